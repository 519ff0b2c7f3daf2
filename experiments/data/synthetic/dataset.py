"""The synthetic tasks as a dataset."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from experiments.config import TaskConfig, TrainConfig
from experiments.data.batch import Batch, strip
from experiments.data.dataset import BatchShard, EvaluationSet
from experiments.data.gold_alignments import GoldAlignments, diagonal_alignments
from experiments.data.synthetic.tasks import Task


class SyntheticDataset:
  """A synthetic task as a `Dataset`."""

  shared_vocabulary = True

  def __init__(self, config: TaskConfig):
    self._config = config
    self.task = Task(
      config.name, config.symbols, config.min_length, config.max_length
    )
    lengths = [split.max_length for split in config.splits.values()]
    # All sets have one width, so that one compiled function serves them.
    self._widest = dataclasses.replace(
      self.task, width=max(config.max_length, *lengths)
    )
    self.source_vocabulary_size = self.task.vocabulary_size
    self.target_vocabulary_size = self.task.vocabulary_size
    self.max_length = max(self._widest.batch_lengths)
    self.source_words = self.target_words = self.task.words

  def training_batches(
    self, train: TrainConfig, *, seed: int, shard: BatchShard
  ) -> "_TaskBatches":
    """Returns the training batches by step."""
    size = train.batch_size
    return _TaskBatches(self.task, seed, size, shard.rows(size))

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name in `config.data.splits`."""
    chosen = self._config.splits[split]
    task = dataclasses.replace(
      self._widest, min_length=chosen.min_length, max_length=chosen.max_length
    )
    batch = task.evaluation_set(
      self._config.evaluation_seed, chosen.num_examples, name=split
    )
    return EvaluationSet(batch, None)

  def max_prediction_length(self, source_length: int) -> int:
    """Returns the maximum length of a target of any set."""
    del source_length
    return self._widest.batch_lengths[1]

  def target_text(self, tokens: np.ndarray) -> list[str]:
    """Returns the texts of target tokens [N, T]; each ends before its EOS."""
    return [" ".join(self.task.words(strip(row))) for row in tokens]

  def gold_alignments(
    self, source: np.ndarray, target: np.ndarray
  ) -> GoldAlignments | None:
    """Returns the alignment of tokens [S] and [T]; None for lookup."""
    name = self._config.name
    if name == "lookup":
      return None
    return diagonal_alignments(source, target, backwards=name == "reverse")


@dataclasses.dataclass(frozen=True)
class _TaskBatches:
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
