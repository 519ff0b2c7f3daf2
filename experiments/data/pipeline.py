"""The stream of training batches: deterministic, resumable, prefetched."""

import grain
from grain import DatasetIterator

from experiments.data.batch import Batch
from experiments.data.dataset import TrainingBatches


class _Source:
  """The batches of the first `num_steps` steps as a Grain data source."""

  def __init__(self, batches: TrainingBatches, num_steps: int):
    self._batches, self._num_steps = batches, num_steps

  def __len__(self) -> int:
    return self._num_steps

  def __getitem__(self, step: int) -> Batch:
    return self._batches[step]


def stream(batches: TrainingBatches, num_steps: int) -> DatasetIterator:
  """Returns an iterator over batches that a thread prefetches.

  `get_state` returns its position as a small dictionary, for `set_state`.
  """
  source = grain.MapDataset.source(_Source(batches, num_steps))
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(source.to_iter_dataset(options))
