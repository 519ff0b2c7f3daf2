"""The stream of training batches: deterministic, resumable, prefetched."""

from collections.abc import Iterator, Mapping
from typing import Any

from experiments.data.batch import Batch
from experiments.data.dataset import TrainingBatches

_NEXT = "next_index"  # Grain's name of the next step


class Stream(Iterator[Batch]):
  """The batches of steps; a thread prefetches from the second one on."""

  def __init__(self, batches: TrainingBatches, num_steps: int):
    self._batches, self._num_steps = batches, num_steps
    self._next, self._has_begun = 0, False
    self._prefetched: Any = None  # an iterator of Grain

  def get_state(self) -> dict[str, Any]:
    """Returns the position, for a checkpoint."""
    if self._prefetched is None:
      return {_NEXT: self._next}
    return self._prefetched.get_state()

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues at a position."""
    self._next, self._has_begun = state[_NEXT], False
    self._prefetched = None

  def __next__(self) -> Batch:
    """Returns the batch of the next step."""
    if self._prefetched is not None:
      return next(self._prefetched)
    if self._next == self._num_steps:
      raise StopIteration
    # Grain, which imports Orbax, is imported after the first step.
    if self._has_begun:
      self._prefetched = _prefetched(self._batches, self._num_steps)
      self._prefetched.set_state({_NEXT: self._next})
      return next(self._prefetched)
    self._has_begun = True
    self._next += 1
    return self._batches[self._next - 1]


def _prefetched(batches: TrainingBatches, num_steps: int) -> Any:
  import grain

  steps = grain.MapDataset.range(num_steps).map(batches.__getitem__)
  options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
  return iter(steps.to_iter_dataset(options))
