"""The interface of datasets, which synthetic tasks and text implement."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from experiments.data.batch import Batch
from experiments.data.gold_alignments import GoldAlignments
from experiments.data.text.readers import ParallelText


class EvaluationSet(NamedTuple):
  """Sources and their references.

  Attributes:
    batch: sources [N, S] and references [N, T].
    text: the sentences of the batch; None for synthetic tasks.
    num_truncated: number of examples that were cut to the longest length.
  """

  batch: Batch
  text: ParallelText | None
  num_truncated: int = 0


class BatchShard(NamedTuple):
  """The slice of every global batch that this process loads.

  Attributes:
    indices: the shards that this process loads, in order.
    num_shards: the number of equal shards of a batch.
  """

  indices: tuple[int, ...] = (0,)
  num_shards: int = 1

  def rows(self, batch_size: int) -> np.ndarray:
    """Returns the indices of the rows to load."""
    shards = np.arange(batch_size).reshape(self.num_shards, -1)
    return shards[list(self.indices)].ravel()


class Dataset(Protocol):
  """The properties and methods that experiments need of their data.

  Attributes:
    source_vocabulary_size: number of source tokens, special ones included.
    target_vocabulary_size: V.
    shared_vocabulary: whether source and target have the same token ids.
    max_length: the longest source or target, EOS included.
  """

  @property
  def source_vocabulary_size(self) -> int: ...  # noqa: D102
  @property
  def target_vocabulary_size(self) -> int: ...  # noqa: D102
  @property
  def shared_vocabulary(self) -> bool: ...  # noqa: D102
  @property
  def max_length(self) -> int: ...  # noqa: D102

  def training_batches(
    self, *, seed: int, size: int, unit: str, multiple: int, shard: BatchShard
  ) -> "TrainingBatches":
    """Returns the training batches by step.

    Args:
      seed: the seed of the run.
      size: the size of a global batch, in units.
      unit: "examples" or "tokens".
      multiple: the number of rows of a global batch is a multiple of this.
      shard: the slice that this process loads.
    """

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name in `config.data.splits`."""

  def max_prediction_length(self, source_length: int) -> int:
    """Returns the longest prediction for sources of a length."""

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


class TrainingBatches(Protocol):
  """An endless sequence of training batches."""

  def __getitem__(self, step: int) -> Batch:
    """Returns this process's rows of the batch of a step."""

  def describe(self) -> Sequence[str]:
    """Returns lines for the log."""
