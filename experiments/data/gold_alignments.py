"""Gold alignments of source [S] and target [T] tokens."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.data.batch import EOS, PAD

_MAX_DIGITS = 24


class GoldAlignments(NamedTuple):
  """The true alignment of a pair."""

  sure: np.ndarray  # [T, S] bool, pairs that must be aligned
  possible: np.ndarray  # [T, S] bool, pairs that may be; includes the sure ones


def diagonal_alignments(
  source: np.ndarray, target: np.ndarray, *, backwards: bool
) -> GoldAlignments:
  """Aligns symbols at equal positions, counted from the start or the end."""
  sure = np.zeros((len(target), len(source)), bool)
  lengths = (((x != PAD) & (x != EOS)).sum() for x in (source, target))
  position = np.arange(min(lengths))
  sure[position, position[::-1] if backwards else position] = True
  return GoldAlignments(sure, sure)


def number_alignments(
  source: Sequence[str], target: Sequence[str]
) -> GoldAlignments:
  """Aligns tokens of an English number name with those of the Korean one."""
  digits = zip(_english("".join(source)), _korean("".join(target)))
  # Tokens that give the value of a common digit are aligned for sure: "twelve"
  # gives two, and 만 without a digit before it a one. A token that gives the
  # place of a digit, as "hundred" and 백 do, may be aligned with the digit.
  sure, possible = (
    _by_token(korean, target) @ _by_token(english, source).T
    for english, korean in digits
  )
  return GoldAlignments(sure, sure | possible)


class _Digits(NamedTuple):
  """The digits that each letter stands for, as powers of ten."""

  values: list[set[int]]  # digits whose value the letter's word gives
  places: list[set[int]]  # digits whose value or place the letter's word gives


_ONES, _TEENS, _TENS, _THOUSANDS = (
  words.split()
  for words in (
    "one two three four five six seven eight nine",
    "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen"
    " nineteen",
    "twenty thirty forty fifty sixty seventy eighty ninety",
    "thousand million billion trillion quadrillion",
  )
)
_KOREAN_ONES, _KOREAN_TENS = "일이삼사오육칠팔구", "십백천"
_KOREAN_MYRIADS = "만억조경"


def _english(text: str) -> _Digits:
  digits = _Digits([set() for _ in text], [set() for _ in text])
  words = list(re.finditer(r"[^\s_,-]+", text))
  names = [word.group() for word in words]
  power = 0
  # Backwards, since the power of ten of a word depends on the words after it.
  for index in reversed(range(len(words))):
    name, after = names[index], names[index + 1 : index + 2]
    values: set[int] = set()
    if name in _THOUSANDS:
      power = 3 * (1 + _THOUSANDS.index(name))
      places = {power, power + 1, power + 2}
    elif name == "hundred":
      places = {power + 2}
    elif name in _ONES:
      values = places = {power + 2 * (after == ["hundred"])}
    elif name in _TEENS:
      values = places = {power, power + 1}
    elif name in _TENS:
      values = places = {power + 1}
    elif name == "and":
      places = set()
    else:
      raise ValueError(f"{name!r} is not part of an English number")
    for letter in range(*words[index].span()):
      digits.values[letter].update(values)
      digits.places[letter].update(places)
  return digits


def _korean(text: str) -> _Digits:
  digits = _Digits([set() for _ in text], [set() for _ in text])
  power, unit = 0, 0
  for letter in reversed(range(len(text))):
    here, before = text[letter], text[letter - 1 : letter]
    values: set[int] = set()
    places: set[int] = set()
    if here in _KOREAN_MYRIADS:
      power, unit = 4 * (1 + _KOREAN_MYRIADS.index(here)), 0
      places = {power + each for each in range(4)}
      if before not in [*_KOREAN_ONES, *_KOREAN_TENS]:
        values = {power}  # a one, not written
    elif here in _KOREAN_TENS:
      unit = 1 + _KOREAN_TENS.index(here)
      places = {power + unit}
      if before not in [*_KOREAN_ONES]:
        values = {power + unit}
    elif here in _KOREAN_ONES:
      values = places = {power + unit}
      unit = 0
    elif here not in "_ ":
      raise ValueError(f"{here!r} is not part of a Korean number")
    digits.values[letter].update(values)
    digits.places[letter].update(places)
  return digits


def _by_token(letters: list[set[int]], tokens: Sequence[str]) -> np.ndarray:
  """Returns [tokens, powers of ten] bool from the digits of each letter."""
  digits = np.zeros((len(tokens), _MAX_DIGITS), bool)
  start = 0
  for row, token in zip(digits, tokens):
    row[list(set().union(*letters[start : start + len(token)]))] = True
    start += len(token)
  return digits
