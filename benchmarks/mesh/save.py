"""The time that an asynchronous save adds to training steps."""

import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.mesh import processes
from experiments.checkpoints.manager import opened
from experiments.config import TrainConfig
from experiments.optimization.step import TrainState

_SIDE, _LAYERS = 2048, 24
_FIRST, _SAVED, _STEPS = 2, 10, 30  # the first two steps warm up


def measure() -> dict[str, float]:
  """Measures steps without a save, and the steps after starting one.

  In seconds: a "step" without a save, the "call" that starts the save, the
  extra time of all steps after it, and the wait for the save at the end; and
  the last two as a share of a hundred steps.
  """
  state, x = _state(), jnp.ones((_SIDE // 2, _SIDE))
  without: list[float] = []
  saving: list[float] = []
  with (
    tempfile.TemporaryDirectory() as folder,
    opened(Path(folder), TrainConfig(keep_last=1)) as manager,
  ):
    for number in range(_STEPS):
      begin = time.perf_counter()
      state, x = _step(state, x)
      jax.block_until_ready(x)
      if number == _SAVED:
        called = time.perf_counter()
        manager.save_state(state, {"next_index": number}, None)
        call = time.perf_counter() - called
      if number >= _FIRST:
        times = saving if number >= _SAVED else without
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    manager.wait()
    rest = time.perf_counter() - begin
  step = statistics.median(without)
  extra = sum(saving) - step * len(saving)
  return {
    "parameters": sum(leaf.size for leaf in state.params.values()),
    "step": step,
    "call": call,
    "extra time of later steps": extra,
    "wait at the end": rest,
    "share of a hundred steps": max(extra + rest, 0.0) / (100 * step),
  }


def _state() -> TrainState:
  """Parameters, and two moments of each."""
  params = {f"w{i}": jnp.ones((_SIDE, _SIDE)) for i in range(_LAYERS)}
  return TrainState(
    step=jnp.int32(0),
    params=params,
    opt_state=(params, params),
    rng=jax.random.key(0),
    average=None,
  )


@jax.jit
def _step(state, x):
  """About 0.2 TFLOP, as 100 million parameters need for few tokens."""
  for leaf in state.params.values():
    x = jnp.tanh(x @ leaf)
  return state.replace(step=state.step + 1), x


if __name__ == "__main__":
  processes.print_results(measure)
