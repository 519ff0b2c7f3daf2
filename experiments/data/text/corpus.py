"""Training text as tokens, dealt into batches, epoch by epoch.

A batch is a function of (text, seed, step): nothing needs to be remembered to
go on where a run was stopped but the number of the step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.config import TranslationConfig
from experiments.data.batch import EOS, PAD, Batch
from experiments.data.dataset import BatchShard
from experiments.data.text import bucketing
from experiments.data.text.readers import ParallelText, drop_blank_pairs
from experiments.data.text.subword_sampling import Sampler
from experiments.data.text.tokenizer import Tokenizer
from experiments.errors import UserError


class TokenPairs(NamedTuple):
  """Sentence pairs as tokens, without EOS.

  Attributes:
    source: N int32 vectors.
    target: N int32 vectors.
  """

  source: Sequence[np.ndarray]
  target: Sequence[np.ndarray]

  @property
  def lengths(self) -> np.ndarray:
    """[N, 2], EOS included."""
    sides = [[len(tokens) + 1 for tokens in side] for side in self]
    return np.array(sides, int).reshape(2, -1).T


class ParallelCorpus:
  """The training pairs of a run.

  Attributes:
    text: pairs with something on both sides, and not too long.
    blank: number of pairs left out, since a side was blank.
    too_long: number of pairs left out, since a side was too long.

  Example:
    >>> corpus = ParallelCorpus(text, source, target, config)  # doctest: +SKIP
    >>> corpus.training_batches(  # doctest: +SKIP
    ...   seed=0, size=4096, unit="tokens", multiple=8, shard=BatchShard()
    ... )[7].source.shape
    (256, 16)
  """

  def __init__(
    self,
    text: ParallelText,
    source: Tokenizer,
    target: Tokenizer,
    config: TranslationConfig,
  ):
    """Turns text into tokens.

    Args:
      text: all pairs.
      source: turns sources into tokens.
      target: turns targets into tokens.
      config: `config.data`.

    Raises:
      UserError: if nothing is left.
    """
    kept, self.blank = drop_blank_pairs(text)
    self._config = config
    pairs = TokenPairs(source.encode(kept.source), target.encode(kept.target))
    fits = np.flatnonzero((pairs.lengths <= config.max_length).all(1)).tolist()
    self.too_long = len(kept.source) - len(fits)
    if not fits:
      raise UserError(
        f"config.data.train: of {len(text.source):,} pairs {self.blank:,} are"
        f" blank and {self.too_long:,} longer than config.data.max_length"
        f" {config.max_length}; none is left"
      )
    self.text = ParallelText(*([side[i] for i in fits] for side in kept))
    self._pairs = TokenPairs(*([side[i] for i in fits] for side in pairs))
    sides = (source, config.source_tokenizer), (target, config.target_tokenizer)
    self._samplers = [
      Sampler(*side) if side[1].sampling else None for side in sides
    ]

  def pairs(self, seed: int, epoch: int, longest: Sequence[int]) -> TokenPairs:
    """Returns the pairs as an epoch reads them: segmented anew, if so set.

    Args:
      seed: the run's.
      epoch: from 0.
      longest: source and target, EOS included.

    Returns:
      The pairs; a sample that is longer is replaced by the best segmentation.
    """
    sides = []
    for side, sampler in enumerate(self._samplers):
      best = self._pairs[side]
      if sampler:
        sampled = sampler.encode(self.text[side], seed=f"{seed} {epoch} {side}")
        best = [
          new if len(new) < longest[side] else old
          for new, old in zip(sampled, best)
        ]
      sides.append(best)
    return TokenPairs(*sides)

  def training_batches(
    self, *, seed: int, size: int, unit: str, multiple: int, shard: BatchShard
  ) -> "BucketedBatches":
    """Returns the batches of training, by step."""
    config = self._config
    first = self.pairs(seed, 0, [config.max_length] * 2)
    shapes = bucketing.choose_shapes(first.lengths, config.num_shapes)
    # What a later epoch segments into more is read in its best segmentation.
    shapes[-1] = np.maximum(shapes[-1], self._pairs.lengths.max(0))
    sizes = bucketing.batch_sizes(
      shapes, size=size, unit=unit, multiple=multiple
    )
    return BucketedBatches(self, seed, shapes, sizes, shard)


class _Epoch(NamedTuple):
  """Where an epoch begins: its first step, and what the one before left."""

  first_step: int
  left: np.ndarray


class BucketedBatches:
  """The batches of a corpus, by step.

  Attributes:
    shapes: [K, 2] the shapes of batches.
    sizes: [K] their numbers of rows, over all processes.

  Example:
    >>> batches = corpus.training_batches(  # doctest: +SKIP
    ...   seed=0, size=4096, unit="tokens", multiple=8, shard=BatchShard()
    ... )
    >>> batches.shapes[0], batches.sizes[0]  # doctest: +SKIP
    (array([16, 16]), 256)
  """

  def __init__(
    self, corpus: ParallelCorpus, seed, shapes, sizes, shard: BatchShard
  ):
    """Made by `Corpus.training_batches`."""
    self.shapes, self.sizes = shapes, sizes
    self._corpus, self._seed, self._shard = corpus, seed, shard
    self._epochs = [_Epoch(0, np.array([], int))]
    self._current: tuple[int, TokenPairs, bucketing.EpochPlan] | None = None

  def __getitem__(self, step: int) -> Batch:
    """Returns this process's rows of the batch that a step reads."""
    epoch, pairs, plan = self._epoch_of(step)
    place = step - self._epochs[epoch].first_step
    members = plan.members[place]
    rows = members[self._shard.rows(len(members))]
    width = self.shapes[plan.shapes[place]]
    return Batch(
      padded([pairs.source[i] for i in rows], width[0]),
      padded([pairs.target[i] for i in rows], width[1]),
    )

  def padding(self) -> float:
    """Returns the share of PAD in the first epoch's batches."""
    _, pairs, plan = self._epoch_of(0)
    lengths = pairs.lengths
    real = sum(lengths[rows].sum() for rows in plan.members)
    whole = (self.shapes.sum(1) * self.sizes)[plan.shapes].sum()
    return float(1 - real / whole)

  def describe(self) -> Sequence[str]:
    """Says what there is, for a reader."""
    shapes = ", ".join(
      f"{rows}x({source}+{target})"
      for rows, (source, target) in zip(self.sizes, self.shapes)
    )
    corpus = self._corpus
    return (
      f"{len(corpus.text.source):,} training pairs ({corpus.blank:,} blank and"
      f" {corpus.too_long:,} over-long left out)",
      f"{len(self.shapes)} shapes of batches, {self.padding():.1%} padding:"
      f" {shapes}",
    )

  def _epoch_of(self, step: int) -> tuple[int, TokenPairs, bucketing.EpochPlan]:
    """The epoch in which a step is, its pairs and its batches."""
    if self._current:
      epoch, _, plan = self._current
      first = self._epochs[epoch].first_step
      if first <= step < first + len(plan.members):
        return self._current
    # Epochs have different numbers of batches: they are counted one by one.
    firsts = [epoch.first_step for epoch in self._epochs]
    epoch = int(np.searchsorted(firsts, step, side="right")) - 1
    while True:
      pairs, plan = self._deal(epoch)
      following = firsts[epoch] + len(plan.members)
      if epoch + 1 == len(self._epochs):
        self._epochs.append(_Epoch(following, plan.left))
        firsts.append(following)
      if step < following:
        self._current = (epoch, pairs, plan)
        return self._current
      epoch += 1

  def _deal(self, epoch: int) -> tuple[TokenPairs, bucketing.EpochPlan]:
    pairs = self._corpus.pairs(self._seed, epoch, self.shapes[-1])
    plan = bucketing.plan_epoch(
      pairs.lengths,
      self.shapes,
      self.sizes,
      self._epochs[epoch].left,
      np.random.default_rng([self._seed, epoch]),
    )
    return pairs, plan


def padded(rows: Sequence[np.ndarray], width: int) -> np.ndarray:
  """Ends token vectors with EOS and pads them to one width.

  Args:
    rows: N integer vectors, shorter than the width.
    width: L.

  Returns:
    [N, L] int32.

  Example:
    >>> padded([np.array([5, 6]), np.array([7])], 4)
    array([[5, 6, 2, 0],
           [7, 2, 0, 0]], dtype=int32)
  """
  array = np.full((len(rows), width), PAD, np.int32)
  for row, tokens in zip(array, rows):
    row[: len(tokens)] = tokens
    row[len(tokens)] = EOS
  return array
