"""Sampled subwords: as likely as the papers say, the same in every process."""

import hashlib
import itertools
import math
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
import sentencepiece

from experiments.config import TokenizerConfig
from experiments.data.batch import UNK
from experiments.data.text.subword_sampling import Sampler
from experiments.data.text.tokenizer import Tokenizer, train

KINDS = ("unigram", "bpe")
ROOTS = ("schnee", "hund", "mann", "läufer", "haus", "강아지", "눈사람")
LINES = [
  f"{a}{b} {b}{c}, {c}."
  for a, b, c in itertools.product(ROOTS, repeat=3)
  if a != b
]


def subword_config(kind, rate):
  size = {"unigram": 60, "bpe": 70}[kind]
  return TokenizerConfig(kind=kind, vocabulary_size=size, sampling=rate)


def make_sampler(kind, rate=0.3):
  config = subword_config(kind, rate)
  tokenizer = train(LINES, config, field="config.data.source_tokenizer")
  return tokenizer, Sampler(tokenizer, config)


@pytest.fixture(scope="module", params=KINDS)
def sampler(request):
  return make_sampler(request.param)


def lists(rows):
  return [row.tolist() for row in rows]


def test_samples_differ_and_say_the_same(sampler):
  tokenizer, sampler = sampler
  best = lists(tokenizer.encode(LINES))
  samples = [lists(sampler.encode(LINES, seed=seed)) for seed in range(3)]
  for rows in samples:
    assert tokenizer.decode(map(np.array, rows)) == LINES
    assert all(token > UNK for row in rows for token in row)
    assert np.mean([a != b for a, b in zip(rows, best)]) > 0.3
  assert np.mean([a != b for a, b in zip(*samples[:2])]) > 0.3
  # Not only from line to line, but within one.
  (row,) = sampler.encode(["schneemann " * 50], seed=0)
  cut = "".join(tokenizer.words(row)).split("_")[1:]
  assert set(cut) == {"schneemann"}
  assert len(row) not in (50, 50 * len("schneemann"))


def test_a_sample_depends_on_text_and_seed_alone(sampler):
  tokenizer, sampler = sampler
  expected = lists(sampler.encode(LINES, seed=7))
  sampler.encode(LINES[:3], seed=1)
  sentencepiece.set_random_generator_seed(1)
  tokenizer.encode(LINES)
  elsewhere = []
  thread = threading.Thread(
    target=lambda: elsewhere.append(sampler.encode(LINES, seed=7))
  )
  thread.start()
  thread.join()
  assert lists(elsewhere[0]) == expected
  assert lists(sampler.encode(LINES, seed=7)) == expected


def test_another_process_trains_and_samples_the_same():
  code = """
from tests.experiments.data.text.test_subword_sampling import KINDS, fingerprint
print(*map(fingerprint, KINDS))
"""
  found = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert found.stdout.split() == [fingerprint(kind) for kind in KINDS]


def fingerprint(kind):
  tokenizer, sampler = make_sampler(kind)
  tokens = np.concatenate(sampler.encode(LINES, seed="3"))
  return hashlib.sha256(tokenizer.model + tokens.tobytes()).hexdigest()


def odds_of_unigrams(pieces, rate, word):
  """Of all segmentations of a word, by section 3.3 of Kudo's paper."""
  weights = {}
  for cuts in itertools.product((False, True), repeat=len(word) - 1):
    ends = [i + 1 for i, cut in enumerate(cuts) if cut]
    parts = [word[a:b] for a, b in zip([0, *ends], [*ends, None])]
    if all(part in pieces for part in parts):
      score = sum(pieces[part][1] for part in parts)
      weights[tuple(parts)] = math.exp(rate * score)
  return {parts: w / sum(weights.values()) for parts, w in weights.items()}


def odds_of_merges(pieces, rate, word):
  """Of all segmentations of a word, by algorithm 1 of Provilkov's paper."""
  odds, states = Counter(), Counter({tuple(word): 1.0})
  while states:
    parts, chance = states.popitem()
    merges = sorted(
      (-pieces[a + b][1], i)
      for i, (a, b) in enumerate(itertools.pairwise(parts))
      if a + b in pieces
    )
    for _, i in merges:
      merged = (*parts[:i], parts[i] + parts[i + 1], *parts[i + 2 :])
      states[merged] += chance * (1 - rate)
      chance *= rate
    odds[parts] += chance
  return odds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [0.1, 0.6])
def test_segmentations_are_as_likely_as_the_paper_says(kind, rate):
  tokenizer, sampler = make_sampler(kind, rate)
  pieces, count = tokenizer.pieces(), 20_000
  names = {token: text for text, (token, _) in pieces.items()}
  expected = {"unigram": odds_of_unigrams, "bpe": odds_of_merges}[kind](
    pieces, rate, " hundmann"
  )
  assert len(expected) > 5
  rows = lists(sampler.encode(["hundmann"] * count, seed=0))
  found = Counter(tuple(names[token] for token in row) for row in rows)
  assert found.keys() <= expected.keys()
  for parts, chance in expected.items():
    deviation = math.sqrt(chance * (1 - chance) / count)
    assert abs(found[parts] / count - chance) <= 5 * deviation + 1e-4


def test_next_to_nothing_left_out_is_the_best_segmentation():
  tokenizer, sampler = make_sampler("bpe", 1e-12)
  assert lists(sampler.encode(LINES, seed=0)) == lists(tokenizer.encode(LINES))


def test_what_was_never_seen_is_as_without_sampling(sampler):
  tokenizer, sampler = sampler
  lines = ["☃", "schnee☃mann ☃☃ hund", "", " \u00a0"]
  for row, best in zip(sampler.encode(lines, seed=0), tokenizer.encode(lines)):
    assert row.dtype == np.int32
    assert row.tolist().count(UNK) == best.tolist().count(UNK)
    assert tokenizer.decode([row]) == tokenizer.decode([best])


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokeniser_that_was_saved_samples_the_same(kind):
  tokenizer, sampler = make_sampler(kind)
  again = Sampler(Tokenizer(tokenizer.model), subword_config(kind, 0.3))
  expected = lists(sampler.encode(LINES, seed=0))
  assert lists(again.encode(LINES, seed=0)) == expected
