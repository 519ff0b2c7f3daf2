"""What a run learns from, whatever it is: a task that is drawn, or text."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from experiments.data.batch import Batch
from experiments.data.gold_alignments import GoldAlignments
from experiments.data.text.readers import ParallelText


class EvaluationSet(NamedTuple):
  """Examples to answer, and what the answers should be.

  Attributes:
    batch: sources [N, S] and references [N, T].
    text: the same as a reader knows them; None for tasks of mere symbols.
    num_truncated: number of examples that were too long, and are not whole.
  """

  batch: Batch
  text: ParallelText | None
  num_truncated: int = 0


class BatchShard(NamedTuple):
  """The slice of every global batch that this process loads.

  Attributes:
    indices: the shards that this process loads, in order.
    num_shards: the number of equal shards of a batch.

  Example:
    >>> BatchShard(indices=(0, 3), num_shards=4).rows(8)
    array([0, 1, 6, 7])
  """

  indices: tuple[int, ...] = (0,)
  num_shards: int = 1

  def rows(self, batch_size: int) -> np.ndarray:
    """Returns the indices of the rows to load."""
    shards = np.arange(batch_size).reshape(self.num_shards, -1)
    return shards[list(self.indices)].ravel()


class Dataset(Protocol):
  """What the loop asks of a task or of text.

  Attributes:
    source_vocabulary_size: number of source tokens, special ones included.
    target_vocabulary_size: V.
    shared_vocabulary: whether equal ids mean the same on both sides.
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
    """Returns the batches of training, by step.

    Args:
      seed: of the run.
      size: of a batch, in units.
      unit: "examples" or "tokens".
      multiple: of which the number of rows is one.
      shard: the slice that this process loads.
    """

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name of `config.data.splits`."""

  def max_prediction_length(self, source_length: int) -> int:
    """Returns the longest answer to sources of so many tokens."""

  def target_text(self, tokens: np.ndarray) -> list[str]:
    """Returns target tokens [N, T] as N texts; EOS ends each."""

  def gold_alignments(
    self, source: np.ndarray, target: np.ndarray
  ) -> GoldAlignments | None:
    """Returns which tokens of a pair belong together, if that is known."""

  def source_words(self, tokens: np.ndarray) -> list[str]:
    """Names [L] source tokens for a reader."""

  def target_words(self, tokens: np.ndarray) -> list[str]:
    """Names [L] target tokens for a reader."""


class TrainingBatches(Protocol):
  """Training batches by step, without an end."""

  def __getitem__(self, step: int) -> Batch:
    """Returns this process's rows of the batch that a step reads."""

  def describe(self) -> Sequence[str]:
    """Says what there is, for a reader."""
