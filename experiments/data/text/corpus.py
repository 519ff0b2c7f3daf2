"""Training pairs as tokens, and their batches by step, epoch by epoch."""

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.config import TrainConfig, TranslationConfig
from experiments.data.batch import EOS, PAD, Batch, BatchShape
from experiments.data.dataset import BatchShard
from experiments.data.text import bucketing
from experiments.data.text.tokenized import TokenizedPairs
from experiments.errors import UserError, counted


class ParallelCorpus:
  """The training pairs of a run, without blank and too long ones."""

  def __init__(self, tokens: TokenizedPairs, config: TranslationConfig):
    self.config, self._tokens = config, tokens
    num_pairs = len(tokens.lengths)
    has_text = tokens.lengths.all(axis=1)
    fits = (tokens.lengths < config.max_length).all(axis=1)  # EOS is added
    self._kept = np.flatnonzero(has_text & fits)
    self.blank = int(num_pairs - has_text.sum())
    self.too_long = num_pairs - self.blank - len(self)
    if not len(self):
      raise UserError(
        f"config.data.train: of {counted(num_pairs, 'pair')} {self.blank:,} are"
        f" blank and {self.too_long:,} longer than config.data.max_length"
        f" {config.max_length}; none is left"
      )
    self.lengths = tokens.lengths[self._kept] + 1  # [N, 2], EOS included

  def __len__(self) -> int:
    return len(self._kept)

  def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens of a source and its target, without EOS."""
    return self._tokens[self._kept[index]]


class _Epoch(NamedTuple):
  """The start of an epoch."""

  first_step: int
  leftover: np.ndarray  # examples that the previous epoch left over


class BucketedBatches:
  """The batches of a corpus, by step; one bucket of examples for each shape."""

  def __init__(
    self,
    corpus: ParallelCorpus,
    train: TrainConfig,
    seed: int,
    shard: BatchShard,
  ):
    self._corpus, self._seed, self._shard = corpus, seed, shard
    self.shapes = bucketing.choose_shapes(
      corpus.lengths, corpus.config.num_shapes, corpus.config.length_multiple
    )
    self.sizes = bucketing.batch_sizes(self.shapes, train)
    self._epochs = [_Epoch(0, np.array([], int))]
    self._plan = functools.lru_cache(maxsize=1)(self._make_plan)

  def __getitem__(self, step: int) -> Batch:
    """Returns this process's rows of the batch of a step."""
    epoch, plan = self._epoch_of(step)
    index = step - self._epochs[epoch].first_step
    examples = plan.examples[index]
    rows = examples[self._shard.rows(len(examples))]
    widths = self.shapes[plan.shapes[index]]
    pairs = [self._corpus[index] for index in rows]
    return Batch(*map(padded, zip(*pairs), widths))

  def padding(self) -> float:
    """Returns the share of PAD in the batches of the first epoch."""
    _, plan = self._epoch_of(0)
    examples = np.concatenate(plan.examples)
    tokens = self._corpus.lengths[examples].sum(dtype=np.int64)
    total = (self.shapes.sum(1) * self.sizes)[plan.shapes].sum()
    return float(1 - tokens / total)

  def batch_shapes(self) -> list[BatchShape]:
    """Returns the shapes of all batches."""
    return [
      BatchShape(rows, *lengths)
      for rows, lengths in zip(self.sizes.tolist(), self.shapes.tolist())
    ]

  def describe(self) -> Sequence[str]:
    """Returns lines for the log."""
    shapes = ", ".join(
      f"{rows}x({source}+{target})"
      for rows, source, target in self.batch_shapes()
    )
    corpus = self._corpus
    num_shapes = counted(len(self.shapes), "batch shape")
    return (
      f"{counted(len(corpus), 'training pair')} ({corpus.blank:,} blank and"
      f" {corpus.too_long:,} too long left out)",
      f"{num_shapes}, {self.padding():.1%} padding: {shapes}",
    )

  def _epoch_of(self, step: int) -> tuple[int, bucketing.EpochPlan]:
    """Returns the epoch that contains a step, and its plan."""
    # Epochs differ in their number of batches, which is part of each plan.
    epoch = bisect.bisect(self._epochs, step, key=lambda e: e.first_step) - 1
    while True:
      plan = self._plan(epoch)
      following = self._epochs[epoch].first_step + len(plan.examples)
      if epoch + 1 == len(self._epochs):
        self._epochs.append(_Epoch(following, plan.leftover))
      if step < following:
        return epoch, plan
      epoch += 1

  def _make_plan(self, epoch: int) -> bucketing.EpochPlan:
    return bucketing.plan_epoch(
      self._corpus.lengths,
      self.shapes,
      self.sizes,
      self._epochs[epoch].leftover,
      np.random.default_rng([self._seed, epoch]),
    )


def padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
  """Ends token vectors shorter than `width` with EOS and pads them."""
  array = np.full((len(rows), width), PAD, np.int32)
  for row, tokens in zip(array, rows):
    row[: len(tokens)] = tokens
    row[len(tokens)] = EOS
  return array
