"""The synthetic tasks as a dataset."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.config import TaskConfig
from experiments.data import gold_alignments
from experiments.data.batch import Batch, strip
from experiments.data.dataset import BatchShard, EvaluationSet
from experiments.data.gold_alignments import GoldAlignments
from experiments.data.synthetic.tasks import Task


class SyntheticDataset:
  """A synthetic task, its training lengths and its evaluation sets.

  Attributes:
    task: what is drawn, at the lengths of training.

  Example:
    >>> from configs import base
    >>> data = SyntheticDataset(TaskConfig(**base.data().to_dict()))
    >>> data.evaluation_set("validation").batch.source.shape
    (256, 31)
  """

  shared_vocabulary = True

  def __init__(self, config: TaskConfig):
    """Makes the dataset of a config."""
    self._config = config
    self.task = Task(
      config.name, config.symbols, config.min_length, config.max_length
    )
    lengths = [split.max_length for split in config.splits.values()]
    # All sets share one width, and so one compiled function.
    self._widest = dataclasses.replace(
      self.task, width=max(config.max_length, *lengths)
    )

  @property
  def source_vocabulary_size(self) -> int:
    """Number of token ids, special ones included."""
    return self.task.vocabulary_size

  @property
  def target_vocabulary_size(self) -> int:
    """Number of token ids, special ones included."""
    return self.task.vocabulary_size

  @property
  def max_length(self) -> int:
    """The longest source or target of any set, EOS included."""
    return max(self._widest.batch_lengths)

  def training_batches(
    self, *, seed: int, size: int, unit: str, multiple: int, shard: BatchShard
  ) -> "_Drawn":
    """Returns the batches of training, by step."""
    del (
      unit,
      multiple,
    )  # A task counts examples: its config is checked for that.
    return _Drawn(self.task, seed, size, shard.rows(size))

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name of `config.data.splits`."""
    chosen = self._config.splits[split]
    task = dataclasses.replace(
      self._widest, min_length=chosen.min_length, max_length=chosen.max_length
    )
    seed, size = self._config.evaluation_seed, chosen.num_examples
    return EvaluationSet(task.evaluation_set(seed, size, name=split), None)

  def max_prediction_length(self, source_length: int) -> int:
    """Returns the longest answer of any set, whatever the source."""
    del source_length
    return self._widest.batch_lengths[1]

  def target_text(self, tokens: np.ndarray) -> list[str]:
    """Returns target tokens [N, T] as N texts; EOS ends each."""
    return [" ".join(self.task.words(strip(row))) for row in tokens]

  def gold_alignments(
    self, source: np.ndarray, target: np.ndarray
  ) -> GoldAlignments | None:
    """Returns which tokens of a pair belong together; None of a look-up."""
    if self._config.name == "lookup":
      return None
    backwards = self._config.name == "reverse"
    return gold_alignments.diagonal_alignments(
      source, target, backwards=backwards
    )

  def source_words(self, tokens: np.ndarray) -> list[str]:
    """Names [L] source tokens for a reader."""
    return self.task.words(tokens)

  def target_words(self, tokens: np.ndarray) -> list[str]:
    """Names [L] target tokens for a reader."""
    return self.task.words(tokens)


@dataclasses.dataclass(frozen=True)
class _Drawn:
  """Training batches, drawn by step."""

  task: Task
  seed: int
  size: int
  rows: np.ndarray

  def __getitem__(self, step: int) -> Batch:
    batch = self.task.training_batch(self.seed, step, self.size)
    return Batch(*(part[self.rows] for part in batch))

  def describe(self) -> Sequence[str]:
    return ()
