"""Encodes lines from the tokens of their words, which are computed once."""

import itertools
from collections.abc import Callable

from experiments.data.batch import UNK

SPACE = "\u2581"  # SentencePiece's symbol for a space
_MAX_WORDS = 1 << 17


class WordCache(dict[str, list[int]]):
  """The token ids of words, as `encode` computes them.

  Encoding a line with `encode` gives the same: no token crosses a space.
  """

  def __init__(self, encode: Callable[[str], list[int]]):
    super().__init__()
    self._encode = encode

  def __missing__(self, word: str) -> list[int]:
    ids = self._encode(word)
    if len(self) < _MAX_WORDS:
      self[word] = ids
    return ids

  def encode(self, line: str) -> list[int]:
    """Returns the token ids of a line with single spaces."""
    if SPACE in line:  # This character is a space, too.
      return self._encode(line)
    words = map(self.__getitem__, line.split(" "))
    ids = list(itertools.chain.from_iterable(words))
    return _with_single_unknowns(ids) if UNK in ids else ids


def _with_single_unknowns(ids: list[int]) -> list[int]:
  """Replaces a run of unknown tokens by one, as SentencePiece does."""
  previous = [None, *ids]
  return [i for i, before in zip(ids, previous) if (i, before) != (UNK, UNK)]
