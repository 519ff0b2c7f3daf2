"""Text to subwords at random, so that a model sees many segmentations of it.

SentencePiece samples too, but since 0.2.2 what it draws differs from process to
process whatever the seed: a run that is resumed would not be the same run, and
processes that train together would not agree on their batches.
"""

import bisect
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np

from experiments.config import TokenizerConfig
from experiments.data.text.tokenizer import Tokenizer, normalized

# Words whose lattices are remembered.
_WORDS = 1 << 16

Draw = Callable[[], float]


class Sampler:
  """Turns text into subwords, otherwise with every seed.

  No subword spans a space, so that each word is segmented by itself: for BPE
  by "BPE-Dropout: Simple and Effective Subword Regularization", Provilkov et
  al., 2020 (https://arxiv.org/abs/1910.13267), for unigrams by "Subword
  Regularization", Kudo, 2018 (https://arxiv.org/abs/1804.10959).

  Example:
    >>> from experiments.data.text.tokenizer import train
    >>> config = TokenizerConfig(kind="bpe", vocabulary_size=10, sampling=0.5)
    >>> tokenizer = train(["abab abab"], config, field="config.data")
    >>> sampler = Sampler(tokenizer, config)
    >>> rows = [sampler.encode(["abab"], seed=seed)[0] for seed in range(40)]
    >>> sorted({len(row) for row in rows}), set(tokenizer.decode(rows))
    ([1, 2, 3, 4, 5], {'abab'})
  """

  def __init__(self, tokenizer: Tokenizer, config: TokenizerConfig):
    """Prepares a sampler.

    Args:
      tokenizer: of subwords.
      config: its kind, and its `sampling`.
    """
    self._tokenizer, self._rate = tokenizer, config.sampling
    self._pieces = tokenizer.pieces()
    self._longest = max(map(len, self._pieces))
    self._segment = self._bpe if config.kind == "bpe" else self._unigram
    self._lattice = functools.lru_cache(_WORDS)(self._find_lattice)

  def encode(
    self, lines: Sequence[str], *, seed: int | str
  ) -> list[np.ndarray]:
    """Turns lines into token ids, without EOS.

    Args:
      lines: text.
      seed: decides the segmentations.

    Returns:
      An int32 vector a line.
    """
    draw = random.Random(seed).random
    rows = []
    for line in lines:
      row: list[int] = []
      for word in normalized(line).split():
        row += self._tokens(word, draw)
      rows.append(np.array(row, np.int32))
    return rows

  def _tokens(self, word: str, draw: Draw) -> Sequence[int]:
    if self._pieces.keys() >= set(word):
      return self._segment(f" {word}", draw)
    # Of what was never seen there is no choice.
    return self._tokenizer.encode([word])[0].tolist()

  def _bpe(self, word: str, draw: Draw) -> Sequence[int]:
    """Merges what is not left out (Provilkov et al., algorithm 1)."""
    parts = list(word)
    while True:
      best, place = -math.inf, -1
      for i, pair in enumerate(map("".join, itertools.pairwise(parts))):
        if pair in self._pieces:
          score = self._pieces[pair][1]
          if score > best and draw() >= self._rate:
            best, place = score, i
      if place < 0:
        return [self._pieces[part][0] for part in parts]
      parts[place : place + 2] = [parts[place] + parts[place + 1]]

  def _unigram(self, word: str, draw: Draw) -> Sequence[int]:
    """Goes through a word's lattice from its end (Kudo, section 3.3)."""
    lattice, end = self._lattice(word), len(word)
    tokens = []
    while end:
      cumulative, arcs = lattice[end]
      token, end = arcs[bisect.bisect(cumulative, draw())]
      tokens.append(token)
    return tokens[::-1]

  def _find_lattice(self, word: str):
    """Of each end within a word: the pieces there, and their odds so far.

    Returns:
      For each end, cumulative probabilities of all pieces but the last, and
      the pieces: their token ids and where they start.
    """
    lattice: list = [([], [])]
    totals = [0.0]  # logarithms of the weights of all ways to an end
    for end in range(1, len(word) + 1):
      arcs, weights = [], []
      for start in range(max(0, end - self._longest), end):
        if piece := self._pieces.get(word[start:end]):
          token, score = piece
          arcs.append((token, start))
          weights.append(totals[start] + self._rate * score)
      largest = max(weights)
      sums = [*itertools.accumulate(math.exp(w - largest) for w in weights)]
      totals.append(largest + math.log(sums[-1]))
      lattice.append(([each / sums[-1] for each in sums[:-1]], arcs))
    return lattice
