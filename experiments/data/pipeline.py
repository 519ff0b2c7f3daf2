"""The stream of training batches: deterministic, resumable, prefetched."""

import grain
from grain import DatasetIterator

from experiments.data.batch import Batch
from experiments.data.tasks import Task


class _TrainingBatches:
  """Random access to the training batches of a task, by step."""

  def __init__(self, task: Task, seed: int, batch_size: int, num_steps: int):
    self._task, self._seed = task, seed
    self._batch_size, self._num_steps = batch_size, num_steps

  def __len__(self) -> int:
    return self._num_steps

  def __getitem__(self, step: int) -> Batch:
    return self._task.training_batch(self._seed, step, self._batch_size)


def training_batches(
  task: Task, *, seed: int, batch_size: int, num_steps: int
) -> DatasetIterator:
  """Returns an iterator over the training batches of a task.

  Args:
    task: what to draw.
    seed: the run's seed.
    batch_size: N, over all devices and processes.
    num_steps: number of batches.

  Returns:
    An iterator of batches, drawn ahead of time by a thread, whose position
    `get_state` returns as a small dictionary and `set_state` takes back.

  Example:
    >>> task = Task("copy", symbols=9, min_length=1, max_length=4)
    >>> batches = training_batches(task, seed=0, batch_size=2, num_steps=3)
    >>> len(list(batches))
    3
  """
  source = _TrainingBatches(task, seed, batch_size, num_steps)
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(grain.MapDataset.source(source).to_iter_dataset(options))
