"""The built-in corpus: whole numbers, spelt out in two languages.

It needs no download, has as many sentence pairs as anyone asks for, and is a
real problem of alignment, because languages cut the same digits differently:

    12 345 678  twelve million, three hundred and forty-five thousand, ...
    1234 5678   천이백삼십사만 오천육백칠십팔

English has a name for every third power of ten and Korean for every fourth, so
that a word of the one depends on parts of two words of the other, and which
parts on how many digits follow. German says the units before the tens.

Spellings are num2words'. Korean leaves out the one of 만, within a number too:
일억 만 where many write 일억 일만. Persian from nineteen digits and Vietnamese
from fifteen spell some different numbers alike.
"""

import copy
import hashlib
import random
import unicodedata
from collections.abc import Sequence
from typing import Any

from num2words import CONVERTER_CLASSES

from experiments.errors import UserError

SHARES = {"train": 14 / 16, "validation": 1 / 16, "test": 1 / 16}
# From four digits on, num2words fails in Amharic or never ends.
_UNUSABLE = {"am"}


def languages() -> tuple[str, ...]:
  """Lists the languages in which numbers can be spelt.

  Returns:
    Codes, sorted.

  Example:
    >>> {"de", "en", "fr", "ko"} <= set(languages())
    True
  """
  return tuple(sorted(set(CONVERTER_CLASSES) - _UNUSABLE))


def spelled(
  numbers: Sequence[int], language: str, *, field: str = "language"
) -> list[str]:
  """Spells numbers out.

  Args:
    numbers: N of them, from 0.
    language: one of `languages()`.
    field: what error messages call the language.

  Returns:
    N strings in Unicode's normal form C.

  Raises:
    UserError: if the language is unknown, or has no words for so large a
      number.

  Example:
    >>> spelled([12345], "en")
    ['twelve thousand, three hundred and forty-five']
    >>> spelled([12345], "ko")
    ['만 이천삼백사십오']
  """
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
      ) from None
  return texts


def _converter(language: str, largest: int) -> Any:
  """A converter without words for more than `largest`.

  num2words goes through all of its words, up to 10^600, for each part of each
  number: without these German takes a tenth of the time.
  """
  converter = copy.copy(CONVERTER_CLASSES[language])
  if hasattr(converter, "cards"):
    cards = converter.cards.items()
    # Zero is put together from the card of one.
    largest = max(largest, 1)
    converter.cards = {n: word for n, word in cards if n <= largest}
  return converter


def _spelling(converter: Any, number: int) -> str:
  # Each language fails in a way of its own, Turkish by saying nothing.
  try:
    text = converter.to_cardinal(number).strip()
  except Exception as error:
    raise ValueError(str(error).rstrip(".") or type(error).__name__) from None
  if not text:
    raise ValueError("it has no words for it")
  return unicodedata.normalize("NFC", text)


def split_of(number: int) -> str:
  """Tells where a number belongs, by a hash of its decimal digits.

  The same for every seed and language, so that nothing evaluated was ever seen
  in training. One-digit numbers are no exception: the word of one that is held
  out is learnt from longer numbers.

  Args:
    number: a whole number.

  Returns:
    A key of `SHARES`: validation and test get one number in sixteen each.

  Example:
    >>> [split_of(number) for number in (3, 5, 12345)]
    ['train', 'train', 'train']
  """
  digest = hashlib.blake2b(str(number).encode(), digest_size=1).digest()
  return {0: "validation", 1: "test"}.get(digest[0] % 16, "train")


def draw(
  split: str, *, count: int, min_digits: int, max_digits: int, seed: int
) -> list[int]:
  """Draws different numbers of a split, as many of each length.

  Where there are too few of a length, as of one digit, all of them are drawn
  and the longer ones make up for it. Zero is left out: its word occurs in no
  other number, so nobody could learn it if it were held out.

  Args:
    split: a key of `SHARES`.
    count: how many.
    min_digits: number of digits of the shortest, at least 1.
    max_digits: of the longest.
    seed: fixes which, and their order.

  Returns:
    `count` numbers, in random order.

  Raises:
    UserError: if the split has fewer numbers of such lengths.

  Example:
    >>> numbers = draw("test", count=6, min_digits=3, max_digits=5, seed=0)
    >>> sorted(len(str(number)) for number in numbers)
    [3, 3, 4, 4, 5, 5]
  """
  if not 1 <= min_digits <= max_digits:
    raise UserError(
      f"min_digits {min_digits}, max_digits {max_digits}: must be at least 1"
      " and in order"
    )
  rng = random.Random(seed)
  numbers: list[int] = []
  for digits in range(min_digits, max_digits + 1):
    # Shorter numbers come first, so that what they lack is shared out.
    share = (count - len(numbers)) // (max_digits - digits + 1)
    numbers += _of_length(rng, split, digits, share)
  if len(numbers) < count:
    raise UserError(
      f"asked for {count} numbers, but {split} has only {len(numbers)} of"
      f" {min_digits} to {max_digits} digits; raise max_digits"
    )
  rng.shuffle(numbers)
  return numbers


def _of_length(
  rng: random.Random, split: str, digits: int, count: int
) -> list[int]:
  """Draws `count` different numbers, or all there are if these are fewer."""
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
