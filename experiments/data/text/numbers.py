"""The built-in corpus: whole numbers, spelt out in two languages."""

import copy
import hashlib
import random
import unicodedata
from collections.abc import Sequence
from typing import Any

from num2words import CONVERTER_CLASSES

from experiments.config import DigitRange
from experiments.errors import UserError

SHARES = {"train": 14 / 16, "validation": 1 / 16, "test": 1 / 16}
# num2words omits the one before the Korean 만 within a number too: 일억 만,
# where 일억 일만 is common. It spells some different numbers alike in Persian
# (from 19 digits) and Vietnamese (from 15). In Amharic it fails or does not
# return from four digits on.
_UNUSABLE = {"am"}


def languages() -> tuple[str, ...]:
  """Returns the sorted codes of the languages that numbers can be spelt in."""
  return tuple(sorted(set(CONVERTER_CLASSES) - _UNUSABLE))


def spelled(
  numbers: Sequence[int], language: str, *, field: str = "language"
) -> list[str]:
  """Spells N whole numbers out, in Unicode's normal form C."""
  if language not in languages():
    raise UserError(
      f"{field}: num2words has no language {language!r}; known:"
      f" {', '.join(languages())}"
    )
  converter = _converter(language, max(numbers, default=0))
  texts = []
  for number in numbers:
    try:
      texts.append(_spelling(converter, number))
    except ValueError as error:
      raise UserError(
        f"{field}: num2words cannot spell {number} ({len(str(number))} digits)"
        f" in {language!r}: {error}; ask for fewer digits"
      ) from error
  return texts


def _converter(language: str, largest: int) -> Any:
  """Returns a converter without the words for more than `largest`."""
  # num2words searches all its words, up to 10^600, for each part of a number;
  # without the larger ones German takes a tenth of the time.
  converter = copy.copy(CONVERTER_CLASSES[language])
  if hasattr(converter, "cards"):
    cards = converter.cards.items()
    # The converter needs the word for one to spell zero.
    largest = max(largest, 1)
    converter.cards = {n: word for n, word in cards if n <= largest}
  return converter


def _spelling(converter: Any, number: int) -> str:
  # Every language raises errors of other types; Turkish returns "" instead.
  try:
    text = converter.to_cardinal(number).strip()
  except Exception as error:
    raise ValueError(str(error).rstrip(".") or type(error).__name__) from error
  if not text:
    raise ValueError("it has no words for it")
  return unicodedata.normalize("NFC", text)


def split_of(number: int) -> str:
  """Returns the split of a number, by a hash of its digits and no seed."""
  digest = hashlib.blake2b(str(number).encode(), digest_size=1).digest()
  return {0: "validation", 1: "test"}.get(digest[0] % 16, "train")


def draw(
  split: str, wanted: DigitRange, *, seed: int, field: str = "wanted"
) -> list[int]:
  """Draws different numbers of a split, equally many of each length."""
  rng = random.Random(seed)
  numbers: list[int] = []
  for digits in range(wanted.min_digits, wanted.max_digits + 1):
    # If a length has too few numbers, more of the longer ones are drawn.
    missing = wanted.num_examples - len(numbers)
    share = missing // (wanted.max_digits - digits + 1)
    numbers += _of_length(rng, split, digits, share)
  if len(numbers) < wanted.num_examples:
    raise UserError(
      f"{field}: asked for {wanted.num_examples} numbers, but of"
      f" {wanted.min_digits} to {wanted.max_digits} digits only {len(numbers)}"
      f" are {split} numbers; raise max_digits"
    )
  rng.shuffle(numbers)
  return numbers


def _of_length(
  rng: random.Random, split: str, digits: int, count: int
) -> list[int]:
  """Draws `count` different numbers, or all if there are fewer; not zero."""
  # The word for zero occurs in no other number: held out, it cannot be learnt.
  start, stop = 10 ** (digits - 1), 10**digits
  if 2 * count > SHARES[split] * (stop - start):
    everything = [n for n in range(start, stop) if split_of(n) == split]
    return rng.sample(everything, min(count, len(everything)))
  drawn: dict[int, None] = {}
  while len(drawn) < count:
    number = rng.randrange(start, stop)
    if split_of(number) == split:
      drawn[number] = None
  return list(drawn)
