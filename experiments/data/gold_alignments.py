"""Which tokens of a source and a target belong together, where that is known.

Axes: S source, T target.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.data.batch import EOS, PAD

_POWERS = 24


class GoldAlignments(NamedTuple):
  """The true alignment of a pair.

  A target token without any link, as the end, belongs to no source token.

  Attributes:
    sure: [T, S] bool, pairs that must be aligned.
    possible: [T, S] bool, pairs that may be, the sure ones among them.
  """

  sure: np.ndarray
  possible: np.ndarray


def diagonal_alignments(
  source: np.ndarray, target: np.ndarray, *, backwards: bool
) -> GoldAlignments:
  """Links tokens of equal places, from the begin or from the end.

  Args:
    source: [S] token ids, ended by EOS.
    target: [T] token ids, ended by EOS.
    backwards: whether the last source token belongs to the first target token.

  Returns:
    The links; both sides' EOS has none.

  Example:
    >>> source, target = np.array([5, 7, EOS]), np.array([7, 5, EOS])
    >>> diagonal_alignments(source, target, backwards=True).sure.astype(int)
    array([[0, 1, 0],
           [1, 0, 0],
           [0, 0, 0]])
  """
  sure = np.zeros((len(target), len(source)), bool)
  count = min(_length(source), _length(target))
  place = np.arange(count)
  sure[place, place[::-1] if backwards else place] = True
  return GoldAlignments(sure, sure)


def _length(tokens: np.ndarray) -> int:
  return int(((tokens != PAD) & (tokens != EOS)).sum())


def number_alignments(
  source: Sequence[str], target: Sequence[str]
) -> GoldAlignments:
  """Links an English number name's tokens to the Korean one's, by digits.

  Words that say the same digit are linked for sure: "twelve" says two digits,
  and 만 without a digit before it says a one. A word that says where a digit
  stands, as "hundred" and 백, may be linked to the words of those digits and to
  the words that say the same of them.

  Args:
    source: S tokens, a space being "_".
    target: T tokens, likewise.

  Returns:
    The links.

  Raises:
    ValueError: if a word is part of no number.

  Example:
    >>> source, target = ["_twelve", "_thousand"], ["_만", "_이", "천"]
    >>> links = number_alignments(source, target)
    >>> links.sure.astype(int)
    array([[1, 0],
           [1, 0],
           [0, 0]])
    >>> links.possible.astype(int)
    array([[1, 1],
           [1, 1],
           [1, 1]])
  """
  english, korean = _english("".join(source)), _korean("".join(target))
  sure = _linked(english.says, source, korean.says, target)
  possible = _linked(english.places, source, korean.places, target)
  return GoldAlignments(sure, sure | possible)


class _Digits(NamedTuple):
  """What letters say: sets of powers of ten, one a letter.

  Attributes:
    says: which digits' values.
    places: where which digits stand, those whose values it says among them.
  """

  says: list[set[int]]
  places: list[set[int]]

  @classmethod
  def of_nothing(cls, text: str) -> "_Digits":
    return cls([set() for _ in text], [set() for _ in text])


_ONES = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_TEENS = [
  "ten",
  "eleven",
  "twelve",
  "thirteen",
  "fourteen",
  "fifteen",
  "sixteen",
  "seventeen",
  "eighteen",
  "nineteen",
]
_TENS = [
  "twenty",
  "thirty",
  "forty",
  "fifty",
  "sixty",
  "seventy",
  "eighty",
  "ninety",
]
_THOUSANDS = ["thousand", "million", "billion", "trillion", "quadrillion"]
_KOREAN_ONES, _KOREAN_TENS, _KOREAN_MYRIADS = (
  "일이삼사오육칠팔구",
  "십백천",
  "만억조경",
)


def _english(text: str) -> _Digits:
  digits = _Digits.of_nothing(text)
  words = list(re.finditer(r"[^\s_,-]+", text))
  names = [word.group() for word in words]
  power = 0
  # Backwards: what a word stands for depends on what follows it.
  for index in reversed(range(len(words))):
    name, after = names[index], names[index + 1 : index + 2]
    said: set[int] = set()
    if name in _THOUSANDS:
      power = 3 * (1 + _THOUSANDS.index(name))
      placed = {power, power + 1, power + 2}
    elif name == "hundred":
      placed = {power + 2}
    elif name in _ONES:
      said = placed = {power + 2 * (after == ["hundred"])}
    elif name in _TEENS:
      said = placed = {power, power + 1}
    elif name in _TENS:
      said = placed = {power + 1}
    elif name == "and":
      placed = set()
    else:
      raise ValueError(f"{name!r} is part of no English number")
    for letter in range(*words[index].span()):
      digits.says[letter].update(said)
      digits.places[letter].update(placed)
  return digits


def _korean(text: str) -> _Digits:
  digits = _Digits.of_nothing(text)
  power, unit = 0, 0
  for letter in reversed(range(len(text))):
    here, before = text[letter], text[letter - 1 : letter]
    said: set[int] = set()
    placed: set[int] = set()
    if here in _KOREAN_MYRIADS:
      power, unit = 4 * (1 + _KOREAN_MYRIADS.index(here)), 0
      placed = {power + each for each in range(4)}
      if before not in [*_KOREAN_ONES, *_KOREAN_TENS]:
        said = {power}  # the one is left out
    elif here in _KOREAN_TENS:
      unit = 1 + _KOREAN_TENS.index(here)
      placed = {power + unit}
      if before not in [*_KOREAN_ONES]:
        said = {power + unit}
    elif here in _KOREAN_ONES:
      said = placed = {power + unit}
      unit = 0
    elif here not in "_ ":
      raise ValueError(f"{here!r} is part of no Korean number")
    digits.says[letter].update(said)
    digits.places[letter].update(placed)
  return digits


def _linked(english, source, korean, target) -> np.ndarray:
  """Whether tokens share a digit, [T, S]."""
  return _by_token(korean, target) @ _by_token(english, source).T


def _by_token(letters: list[set[int]], tokens: Sequence[str]) -> np.ndarray:
  """[tokens, powers of ten] bool of what is known by the letter."""
  found = np.zeros((len(tokens), _POWERS), bool)
  begin = 0
  for row, token in zip(found, tokens):
    row[list(set().union(*letters[begin : begin + len(token)]))] = True
    begin += len(token)
  return found
