"""The stream of training batches: deterministic, resumable, prefetched."""

import grain
from grain import DatasetIterator

from experiments.data.dataset import TrainingBatches


def stream(batches: TrainingBatches, num_steps: int) -> DatasetIterator:
  """Returns an iterator over batches that a thread prefetches."""
  steps = grain.MapDataset.range(num_steps).map(batches.__getitem__)
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(steps.to_iter_dataset(options))
