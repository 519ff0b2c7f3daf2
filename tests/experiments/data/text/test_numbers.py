"""The built-in corpus of numbers: spellings, splits, draws."""

import unicodedata
from collections import Counter

import num2words
import pytest

from experiments.config import DigitRange
from experiments.data.text.numbers import (
  SHARES,
  draw,
  languages,
  spelled,
  split_of,
)
from experiments.errors import UserError

# From outside num2words.
SPELLINGS = {
  "en": {
    0: "zero",
    7: "seven",
    21: "twenty-one",
    1000: "one thousand",
    12345: "twelve thousand, three hundred and forty-five",
    10**6: "one million",
    10**27: "one octillion",
  },
  "de": {
    16: "sechzehn",
    21: "einundzwanzig",
    345: "dreihundertfünfundvierzig",
    12000: "zwölftausend",
    10**6: "eine Million",
    2 * 10**9: "zwei Milliarden",
  },
  "fr": {
    71: "soixante et onze",
    80: "quatre-vingts",
    81: "quatre-vingt-un",
    99: "quatre-vingt-dix-neuf",
    200: "deux cents",
    1001: "mille un",
    80_000: "quatre-vingt mille",
    10**9: "un milliard",
  },
  "ko": {
    0: "영",
    11: "십일",
    100: "백",
    10_000: "만",
    12_345: "만 이천삼백사십오",
    1_000_000: "백만",
    10**8: "일억",
    10**12: "일조",
    12_345_678: "천이백삼십사만 오천육백칠십팔",
    3 * 10**29: "삼십양",
  },
}
CASES = [
  (language, number)
  for language, words in SPELLINGS.items()
  for number in words
]


def digits(numbers):
  return Counter(len(str(number)) for number in numbers)


@pytest.mark.parametrize(("language", "number"), CASES)
def test_spellings_are_correct(language, number):
  assert spelled([number], language) == [SPELLINGS[language][number]]


@pytest.mark.parametrize("language", ["de", "en", "fr", "ja", "ko", "ru"])
def test_long_numbers_match_num2words(language):
  numbers = draw("train", wanted(90, 1, 30), seed=0)
  expected = [num2words.num2words(n, lang=language) for n in numbers]
  assert spelled(numbers, language) == expected
  assert len(set(expected)) == len(numbers)


@pytest.mark.parametrize("language", languages())
def test_every_language_gives_normalised_distinct_words(language):
  numbers = draw("train", wanted(200, 1, 9), seed=0)
  words = spelled(numbers, language)
  assert all(unicodedata.is_normalized("NFC", text) for text in words)
  assert all(text and text == text.strip() for text in words)
  assert len(set(words)) == len(words)


def test_no_numbers_give_no_words():
  assert spelled([], "en") == []


def test_unknown_language_lists_the_known_ones():
  message = "config.data.source: .* no language 'xx'; known: .* de, en, .* ko,"
  with pytest.raises(UserError, match=message):
    spelled([1], "xx", field="config.data.source")


@pytest.mark.parametrize(
  ("language", "number"), [("pt_BR", 10**20), ("tr", 9_022_677_695_643_589)]
)
def test_number_too_large_for_a_language_is_named(language, number):
  message = rf"target: .* cannot spell {number} \(\d+ digits\) in '{language}'"
  with pytest.raises(UserError, match=message):
    spelled([1, number], language, field="config.data.target")


def wanted(count, shortest, longest):
  return DigitRange(min_digits=shortest, max_digits=longest, num_examples=count)


def test_splits_have_their_shares():
  counts = Counter(split_of(number) for number in range(10_000, 60_000))
  assert set(counts) == set(SHARES)
  for split, share in SHARES.items():
    assert counts[split] / 50_000 == pytest.approx(share, abs=0.005)


def test_split_of_a_number_never_changes():
  # With another hash, numbers held out earlier would enter training.
  held_out = {n: split_of(n) for n in range(31) if split_of(n) != "train"}
  assert held_out == {
    2: "test",
    20: "validation",
    22: "test",
    25: "validation",
    30: "validation",
  }


@pytest.mark.parametrize("split", SHARES)
def test_drawn_numbers_belong_to_their_split(split):
  for seed in range(3):
    drawn = draw(split, wanted(500, 1, 6), seed=seed)
    assert len(drawn) == len(set(drawn)) == 500
    assert {split_of(number) for number in drawn} == {split}


def test_draw_depends_on_its_seed_alone():
  first, again, other = (
    draw("train", wanted(300, 1, 20), seed=seed) for seed in (3, 3, 4)
  )
  assert first == again
  assert first != other


def test_lengths_are_uniform():
  drawn = draw("train", wanted(400, 4, 7), seed=0)
  assert digits(drawn) == {4: 100, 5: 100, 6: 100, 7: 100}
  # In random order: any part of them is uniform as well.
  assert set(digits(drawn[:50])) == {4, 5, 6, 7}


def test_longer_numbers_replace_missing_short_ones():
  short = [n for n in range(1, 100) if split_of(n) == "test"]
  drawn = draw("test", wanted(100, 1, 4), seed=0)
  assert sorted(n for n in drawn if n < 100) == short
  rest = 100 - len(short)
  assert digits(drawn)[3] == rest // 2
  assert digits(drawn)[4] == rest - rest // 2


def test_all_numbers_of_a_length_but_zero_can_be_drawn():
  everything = [n for n in range(1, 1000) if split_of(n) == "train"]
  count = len(everything)
  drawn = draw("train", wanted(count, 1, 3), seed=0)
  assert sorted(drawn) == everything


def test_too_large_count_reports_the_number_available():
  message = (
    "wanted: asked for 100 numbers, .* are test numbers; raise max_digits"
  )
  with pytest.raises(UserError, match=message):
    draw("test", wanted(100, 1, 2), seed=0)
