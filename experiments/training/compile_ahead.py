"""Compiles the training step for all batch shapes at once, in threads."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from experiments.data.batch import Batch
from experiments.distributed.mesh import ROWS
from experiments.experiment import Experiment
from experiments.optimization.step import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]
# Rows, source tokens and target tokens of a batch over all devices.
BatchShape = tuple[int, int, int]


def make_train_step(
  experiment: Experiment, state: TrainState, shapes: Sequence[BatchShape]
) -> Step:
  """The step; on accelerators it starts to compile for all shapes.

  On a CPU, compilation would take the cores from the first steps.
  """
  on_cpu = experiment.mesh.devices.flat[0].platform == "cpu"
  if on_cpu or len(shapes) < 2:
    return experiment.train_step(state)
  return compile_ahead(experiment, state, shapes)


def compile_ahead(
  experiment: Experiment, state: TrainState, shapes: Sequence[BatchShape]
) -> Step:
  """The step for batches of these shapes, each compiled in a thread."""
  step = experiment.jitted_step(state)
  like = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=leaf.sharding
    ),
    state,
  )

  def compiled(shape: BatchShape) -> Any:
    with jax.set_mesh(experiment.mesh):  # of this thread
      return step.lower(like, _abstract_batch(experiment, shape)).compile()

  pool = ThreadPoolExecutor(max_workers=min(len(shapes), os.cpu_count() or 1))
  programs: dict[BatchShape, Future[Any]] = {
    shape: pool.submit(compiled, shape) for shape in shapes
  }
  pool.shutdown(wait=False)

  def update(state: TrainState, batch: Batch):
    shape = (*batch.source.shape, batch.target.shape[1])
    return programs[shape].result()(state, batch)

  return update


def _abstract_batch(experiment: Experiment, shape: BatchShape) -> Any:
  rows, *lengths = shape
  sharding = NamedSharding(experiment.mesh, PartitionSpec(ROWS))
  tokens: list[Any] = [
    jax.ShapeDtypeStruct((rows, length), jnp.int32, sharding=sharding)
    for length in lengths
  ]
  return Batch(*tokens)
