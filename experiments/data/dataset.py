"""The interface of datasets, which synthetic tasks and text implement."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from experiments.config import TrainConfig
from experiments.data.batch import Batch, BatchShape
from experiments.data.gold_alignments import GoldAlignments
from experiments.data.text.readers import ParallelText


class EvaluationSet(NamedTuple):
  """Sources and their references."""

  batch: Batch  # sources [N, S] and references [N, T]
  text: ParallelText | None  # the sentences of the batch; None for tasks
  num_truncated: int = 0  # examples that were cut to the maximum length


class BatchShard(NamedTuple):
  """The slice of every global batch that this process loads."""

  indices: tuple[int, ...] = (0,)  # the shards that this process loads
  num_shards: int = 1  # the number of equal shards of a batch

  def rows(self, batch_size: int) -> np.ndarray:
    """Returns the indices of the rows to load."""
    shards = np.arange(batch_size).reshape(self.num_shards, -1)
    return shards[list(self.indices)].ravel()


class TrainingBatches(Protocol):
  """An endless sequence of training batches."""

  def __getitem__(self, step: int) -> Batch:
    """Returns this process's rows of the batch of a step."""

  def describe(self) -> Sequence[str]:
    """Returns lines for the log."""

  def batch_shapes(self) -> list[BatchShape]:
    """Returns the shapes of all batches."""


class Dataset(Protocol):
  """The attributes and methods that experiments need of their data."""

  source_vocabulary_size: int  # special tokens included
  target_vocabulary_size: int  # special tokens included
  shared_vocabulary: bool  # whether source and target have the same token ids
  max_length: int  # of a source or target, EOS included

  def training_batches(
    self, train: TrainConfig, *, seed: int, shard: BatchShard
  ) -> TrainingBatches:
    """Returns the training batches by step; this process loads `shard`."""

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name in `config.data.splits`."""

  def max_prediction_length(self, source_length: int) -> int:
    """Returns the maximum length of predictions for sources of a length."""

  def source_tokens(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Returns the token ids of each line of source text, without EOS."""

  def target_tokens(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Returns the token ids of each line of target text, without EOS."""

  def target_text(self, tokens: np.ndarray) -> list[str]:
    """Returns the texts of target tokens [N, T]; each ends before its EOS."""

  def gold_alignments(
    self, source: np.ndarray, target: np.ndarray
  ) -> GoldAlignments | None:
    """Returns the alignment of tokens [S] and [T], or None if unknown."""

  def source_words(self, tokens: np.ndarray) -> list[str]:
    """Returns the labels of source tokens [L] in figures."""

  def target_words(self, tokens: np.ndarray) -> list[str]:
    """Returns the labels of target tokens [L] in figures."""
