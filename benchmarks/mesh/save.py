"""What an asynchronous save takes of the steps, at 100 million parameters."""

import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks.mesh import apart
from experiments import checkpoints
from experiments.optimization.step import TrainState

_SIDE, _LAYERS = 2048, 24
_FIRST, _SAVED, _STEPS = 2, 10, 30  # the first two steps warm up


def measure() -> dict[str, float]:
  """Seconds of steps, alone and with a save in the first of the others.

  Returns:
    The number of "parameters"; seconds of a "step" alone, of the "call" that
    saves, of all that the steps after it take beyond theirs, and of what is
    left to write then; and the last two as a share of a hundred steps.

  Example:
    >>> measure()["share of a hundred steps"]  # doctest: +SKIP
    0.023
  """
  state, x = _state(), jnp.ones((_SIDE // 2, _SIDE))
  alone: list[float] = []
  saving: list[float] = []
  with (
    tempfile.TemporaryDirectory() as folder,
    checkpoints.opened(Path(folder), keep_last=1) as manager,
  ):
    for number in range(_STEPS):
      begin = time.perf_counter()
      state, x = _step(state, x)
      jax.block_until_ready(x)
      if number == _SAVED:
        called = time.perf_counter()
        checkpoints.save(manager, state, {"next_index": number}, None)
        call = time.perf_counter() - called
      if number >= _FIRST:
        times = saving if number >= _SAVED else alone
        times.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    checkpoints.wait(manager)
    rest = time.perf_counter() - begin
  step = statistics.median(alone)
  extra = sum(saving) - step * len(saving)
  return {
    "parameters": sum(leaf.size for leaf in state.params.values()),
    "step": step,
    "call": call,
    "extra of all steps after": extra,
    "left to write then": rest,
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
  """Some 0.2 TFLOP: what 100 million parameters take of few tokens."""
  for leaf in state.params.values():
    x = jnp.tanh(x @ leaf)
  return state.replace(step=state.step + 1), x


if __name__ == "__main__":
  apart.report(measure)
