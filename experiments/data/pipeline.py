"""The stream of training batches: deterministic, resumable, prefetched."""

import grain
from grain import DatasetIterator

from experiments.data.batch import Batch
from experiments.data.dataset import TrainingBatches


class _Steps:
  """So many batches, by step, as Grain reads them."""

  def __init__(self, batches: TrainingBatches, num_steps: int):
    self._batches, self._num_steps = batches, num_steps

  def __len__(self) -> int:
    return self._num_steps

  def __getitem__(self, step: int) -> Batch:
    return self._batches[step]


def stream(batches: TrainingBatches, num_steps: int) -> DatasetIterator:
  """Returns an iterator over the training batches of a run.

  Args:
    batches: from a dataset.
    num_steps: number of batches.

  Returns:
    An iterator of batches, made ahead of time by a thread, whose position
    `get_state` returns as a small dictionary and `set_state` takes back.

  Example:
    >>> from configs import base
    >>> from experiments.data.dataset import BatchShard
    >>> from experiments.data.synthetic.dataset import SyntheticDataset
    >>> from experiments.config import TaskConfig
    >>> data = SyntheticDataset(TaskConfig(**base.data().to_dict()))
    >>> batches = data.training_batches(
    ...   seed=0, size=2, unit="examples", multiple=1, shard=BatchShard()
    ... )
    >>> len(list(stream(batches, num_steps=3)))
    3
  """
  source = grain.MapDataset.source(_Steps(batches, num_steps))
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(source.to_iter_dataset(options))
