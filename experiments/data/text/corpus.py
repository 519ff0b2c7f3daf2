"""Training pairs as tokens, and their batches by step, epoch by epoch."""

import bisect
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.config import TrainConfig, TranslationConfig
from experiments.data.batch import EOS, PAD, Batch
from experiments.data.dataset import BatchShard
from experiments.data.text import bucketing
from experiments.data.text.readers import ParallelText, drop_blank_pairs
from experiments.data.text.tokenizer import Tokenizer
from experiments.errors import UserError


class TokenPairs(NamedTuple):
  """Sentence pairs as N int32 vectors a side, without EOS."""

  source: Sequence[np.ndarray]
  target: Sequence[np.ndarray]

  @property
  def lengths(self) -> np.ndarray:
    """[N, 2], EOS included."""
    sides = [[len(tokens) + 1 for tokens in side] for side in self]
    return np.array(sides, int).reshape(2, -1).T


class ParallelCorpus:
  """The training pairs of a run."""

  def __init__(
    self,
    text: ParallelText,
    source: Tokenizer,
    target: Tokenizer,
    config: TranslationConfig,
  ):
    kept = drop_blank_pairs(text)
    self.blank = len(text.source) - len(kept.source)
    self.config = config
    tokens = TokenPairs(source.encode(kept.source), target.encode(kept.target))
    fits = np.flatnonzero((tokens.lengths <= config.max_length).all(1)).tolist()
    self.too_long = len(kept.source) - len(fits)
    if not fits:
      raise UserError(
        f"config.data.train: of {len(text.source):,} pairs {self.blank:,} are"
        f" blank and {self.too_long:,} longer than config.data.max_length"
        f" {config.max_length}; none is left"
      )
    self.text = ParallelText(*([side[i] for i in fits] for side in kept))
    self.tokens = TokenPairs(*([side[i] for i in fits] for side in tokens))


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
    self._lengths = corpus.tokens.lengths
    self.shapes = bucketing.choose_shapes(
      self._lengths, corpus.config.num_shapes
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
    sides = ([side[i] for i in rows] for side in self._corpus.tokens)
    return Batch(*map(padded, sides, widths))

  def padding(self) -> float:
    """Returns the share of PAD in the batches of the first epoch."""
    _, plan = self._epoch_of(0)
    tokens = sum(self._lengths[rows].sum() for rows in plan.examples)
    total = (self.shapes.sum(1) * self.sizes)[plan.shapes].sum()
    return float(1 - tokens / total)

  def describe(self) -> Sequence[str]:
    """Returns lines for the log."""
    shapes = ", ".join(
      f"{rows}x({source}+{target})"
      for rows, (source, target) in zip(self.sizes, self.shapes)
    )
    corpus = self._corpus
    return (
      f"{len(corpus.text.source):,} training pairs ({corpus.blank:,} blank and"
      f" {corpus.too_long:,} too long left out)",
      f"{len(self.shapes)} batch shapes, {self.padding():.1%} padding:"
      f" {shapes}",
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
      self._lengths,
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
