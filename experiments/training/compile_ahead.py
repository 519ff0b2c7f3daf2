"""Compiles the training step in threads, before its first batch is there."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from experiments.cores import num_cores
from experiments.data.batch import Batch, BatchShape
from experiments.data.dataset import TrainingBatches
from experiments.distributed import mesh
from experiments.experiment import Experiment
from experiments.optimization.step import TrainState

Step = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any]]]


def compile_train_step(
  experiment: Experiment, batches: TrainingBatches, first: int
) -> Step:
  """The step; it starts to compile for the batch `first`."""
  # On accelerators it starts to compile for all batches. On a CPU, this would
  # take the cores from the first steps.
  shapes: list[BatchShape] = []
  if first < experiment.config.train.steps:
    batch = mesh.shard_batch(batches[first], experiment.mesh)
    shapes.append(_shape(batch))
  if mesh.platform(experiment.mesh) != "cpu":
    shapes += [shape for shape in batches.batch_shapes() if shape not in shapes]
  return compile_ahead(experiment, shapes)


def compile_ahead(experiment: Experiment, shapes: Sequence[BatchShape]) -> Step:
  """The step, compiled in threads for `shapes`, when needed for others."""
  like = experiment.abstract_state
  step = experiment.jitted_step(like)

  def lowered(shape: BatchShape) -> Any:
    with jax.set_mesh(experiment.mesh):  # of this thread
      return step.lower(like, mesh.abstract_batch(shape, experiment.mesh))

  def compiled(shape: BatchShape) -> Any:
    return lowered(shape).compile()

  programs: dict[BatchShape, Future[Any]] = {}
  pool = ThreadPoolExecutor(num_cores())
  # Python's threads share one core: the first shape is lowered before the other
  # work of the start.
  for shape in shapes[:1]:
    programs[shape] = pool.submit(lowered(shape).compile)
  for shape in shapes[1:]:
    programs[shape] = pool.submit(compiled, shape)

  def update(state: TrainState, batch: Batch):
    shape = _shape(batch)
    if shape not in programs:
      programs[shape] = pool.submit(compiled, shape)
    return programs[shape].result()(state, batch)

  return update


def _shape(batch: Batch) -> BatchShape:
  rows, source = batch.source.shape
  return BatchShape(rows, source, batch.target.shape[1])
