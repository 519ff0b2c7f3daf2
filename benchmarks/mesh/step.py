"""A training step on a mesh of one device, and the same without a mesh."""

import statistics
import time
from typing import Any

import jax
import numpy as np

from benchmarks.mesh import processes
from configs import multi30k
from experiments.config import MeshConfig, parse
from experiments.data.batch import Batch
from experiments.distributed import mesh
from experiments.experiment import Experiment
from experiments.models import make_model
from experiments.optimization.optimizer import make_optimizer
from experiments.optimization.step import make_train_step


def measure() -> dict[str, float]:
  """Median milliseconds of both, timed in turn, and of their ratio."""
  cases = _cases()
  times: dict[str, list[float]] = {name: [] for name in cases}
  states = {name: state for name, (_, _, state) in cases.items()}
  for turn in range(24):
    for name in sorted(cases, reverse=bool(turn % 2)):
      step, place_batch, _ = cases[name]
      begin = time.perf_counter()
      states[name], metrics = step(states[name], place_batch())
      jax.block_until_ready((states[name], metrics))
      if turn >= 4:
        times[name].append(1e3 * (time.perf_counter() - begin))
  ratios = [mesh / plain for mesh, plain in zip(times["mesh"], times["plain"])]
  return {
    "mesh": statistics.median(times["mesh"]),
    "plain": statistics.median(times["plain"]),
    "ratio": statistics.median(ratios),
  }


def _cases() -> dict[str, Any]:
  """For each case: the step, a function that places a batch, and a state."""
  config = parse(multi30k.get_config().to_dict())
  model = make_model(
    config.model,
    source_vocabulary_size=8000,
    target_vocabulary_size=8000,
    shared_vocabulary=True,
    max_length=64,
    dtype="float32",
  )
  optimizer = make_optimizer(config.optimizer, 100)
  one = mesh.make_mesh(MeshConfig.one())
  experiment = Experiment(config, one, None, model, optimizer)  # type: ignore[arg-type]
  state = experiment.initial_state()
  rng = np.random.default_rng(0)
  batch = Batch(*rng.integers(4, 8000, (2, 256, 16), np.int32))
  plain = make_train_step(model, optimizer, config.train)
  return {
    "mesh": (
      experiment.train_step(state),
      lambda: mesh.shard_batch(batch, one),
      state,
    ),
    "plain": (
      jax.jit(plain, donate_argnums=0),
      lambda: jax.device_put(batch),
      jax.tree.map(lambda leaf: leaf.copy(), state),
    ),
  }


if __name__ == "__main__":
  processes.print_results(measure)
