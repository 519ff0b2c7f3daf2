"""The synthetic tasks as a dataset."""

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

from experiments.config import TaskConfig, TrainConfig
from experiments.data.batch import (
  BOS,
  EOS,
  NUM_SPECIAL,
  PAD,
  Batch,
  BatchShape,
  strip,
)
from experiments.data.dataset import BatchShard, EvaluationSet
from experiments.data.gold_alignments import GoldAlignments, diagonal_alignments
from experiments.data.synthetic import tasks
from experiments.errors import UserError

_TRAINING, _EVALUATION = 0, 1
_SPECIAL = {PAD: "<pad>", BOS: "<s>", EOS: "</s>"}


class SyntheticDataset:
  """A synthetic task as a `Dataset`."""

  shared_vocabulary = True

  def __init__(self, config: TaskConfig):
    self.config = config
    # All sets have one width, so that one compiled function serves them.
    lengths = [split.max_length for split in config.splits.values()]
    self._width = max(config.max_length, *lengths)
    self.max_length = max(tasks.batch_lengths(config.name, self._width))
    # The longest source in training, in tokens without EOS.
    trained, _ = tasks.batch_lengths(config.name, config.max_length)
    self.trained_length = trained - 1
    # The keys of lookup are other symbols than the values.
    num_symbols = config.symbols * (2 if config.name == "lookup" else 1)
    self.source_vocabulary_size = NUM_SPECIAL + num_symbols
    self.target_vocabulary_size = self.source_vocabulary_size

  def training_batches(
    self, train: TrainConfig, *, seed: int, shard: BatchShard
  ) -> "_TaskBatches":
    """Returns the training batches by step."""
    size = train.batch_size
    return _TaskBatches(self.config, seed, size, shard.rows(size))

  def evaluation_set(self, split: str) -> EvaluationSet:
    """Returns the set of a name in `config.data.splits`."""
    seed, wanted = self.config.evaluation_seed, self.config.splits[split]
    batch = tasks.draw(
      self.config,
      np.random.default_rng([seed, _EVALUATION, zlib.crc32(split.encode())]),
      wanted,
      size=wanted.num_examples,
      width=self._width,
      held_out_only=True,
    )
    return EvaluationSet(batch, None)

  def max_prediction_length(self, source_length: int) -> int:
    """Returns the maximum length of a target of any set."""
    del source_length
    return tasks.batch_lengths(self.config.name, self._width)[1]

  def source_words(self, tokens: np.ndarray) -> list[str]:
    """Returns labels of tokens [L]; symbols count from 0."""
    return [
      _SPECIAL.get(token, str(token - NUM_SPECIAL)) for token in tokens.tolist()
    ]

  target_words = source_words

  def source_tokens(self, lines: Sequence[str]) -> list[np.ndarray]:
    """Returns the token ids of lines such as "3 1 4"."""
    return [self._tokens(line) for line in lines]

  target_tokens = source_tokens

  def _tokens(self, line: str) -> np.ndarray:
    most = self.source_vocabulary_size - NUM_SPECIAL - 1
    for word in line.split():
      if not (word.isdecimal() and int(word) <= most):
        raise UserError(
          f"{word!r} is no symbol of {self.config.name}; a line has numbers"
          f" from 0 to {most}, separated by spaces"
        )
    symbols = [NUM_SPECIAL + int(word) for word in line.split()]
    return np.array(symbols, np.int32)

  def target_text(self, tokens: np.ndarray) -> list[str]:
    """Returns the texts of target tokens [N, T]; each ends before its EOS."""
    return [" ".join(self.target_words(strip(row))) for row in tokens]

  def gold_alignments(
    self, source: np.ndarray, target: np.ndarray
  ) -> GoldAlignments | None:
    """Returns the alignment of tokens [S] and [T]; None for lookup."""
    name = self.config.name
    if name == "lookup":
      return None
    return diagonal_alignments(source, target, backwards=name == "reverse")


@dataclasses.dataclass(frozen=True)
class _TaskBatches:
  """Training batches, drawn by step."""

  config: TaskConfig
  seed: int
  size: int
  rows: np.ndarray

  def __getitem__(self, step: int) -> Batch:
    batch = tasks.draw(
      self.config,
      np.random.default_rng([self.seed, _TRAINING, step]),
      self.config,
      size=self.size,
      width=self.config.max_length,
      held_out_only=False,
    )
    return Batch(*(part[self.rows] for part in batch))

  def batch_shapes(self) -> list[BatchShape]:
    lengths = tasks.batch_lengths(self.config.name, self.config.max_length)
    return [BatchShape(self.size, *lengths)]

  def describe(self) -> Sequence[str]:
    return ()
