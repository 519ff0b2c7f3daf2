"""A corpus: which batch a step reads, whoever asks, and whatever was before."""

import itertools
from collections import Counter
from typing import NamedTuple

import jax
import numpy as np
import pytest

from configs import base
from experiments.config import TextConfig
from experiments.data import pipeline
from experiments.data.batch import EOS, PAD, UNK
from experiments.data.dataset import BatchShard
from experiments.data.text import bucketing
from experiments.data.text.corpus import ParallelCorpus, TokenPairs, padded
from experiments.data.text.readers import ParallelText
from experiments.data.text.tokenizer import Tokenizer, train
from experiments.errors import UserError

NOUNS = ("dog", "horse", "river", "mountain", "tree")
SOURCE = [
  " ".join(words)
  for count in range(2, 5)
  for words in itertools.permutations(NOUNS, count)
]
TARGET = [line[::-1] for line in SOURCE]
ALONE = BatchShard()


class Made(NamedTuple):
  """A corpus, and what its tokens mean."""

  corpus: ParallelCorpus
  tokenizer: Tokenizer

  def says(self, batch):
    """The pairs of a batch, whatever their segmentation."""
    return list(zip(*map(self.tokenizer.decode, batch)))


def make_corpus(
  source=SOURCE, target=TARGET, kind="words", rates=(0.0, 0.0), max_length=40
):
  tokenizers = [
    {"kind": kind, "vocabulary_size": 60, "sampling": rate} for rate in rates
  ]
  config = TextConfig(
    **base.text().to_dict()
    | dict(zip(("source_tokenizer", "target_tokenizer"), tokenizers))
    | {"joint_vocabulary": False, "max_length": max_length, "num_shapes": 4}
  )
  tokenizer = train(
    [*SOURCE, *TARGET], config.source_tokenizer, field="config.data"
  )
  text = ParallelText(source, target)
  return Made(ParallelCorpus(text, tokenizer, tokenizer, config), tokenizer)


CASES = {
  "plain": {},
  "sampled": {"kind": "bpe", "rates": (0.3, 0.3)},
  "half": {"kind": "bpe", "rates": (0.0, 0.3)},
}


@pytest.fixture(scope="module", params=list(CASES))
def made(request):
  return make_corpus(**CASES[request.param])


def deal(made, *, seed=0, size=60, unit="tokens", multiple=1, shard=ALONE):
  return made.corpus.training_batches(
    seed=seed, size=size, unit=unit, multiple=multiple, shard=shard
  )


def assert_equal(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_any_order_gives_the_batches_of_reading_on(made):
  batches = deal(made)
  expected = [batches[step] for step in range(150)]
  for order in (np.random.default_rng(0).permutation(150)[:40], [149, 0, 149]):
    fresh = deal(made)
    for step in order:
      assert_equal(fresh[step], expected[step])


@pytest.mark.parametrize("stop", [1, 23, 149])
def test_a_stream_goes_on_where_it_was_stopped(made, stop):
  batches = deal(made)
  expected = [batches[step] for step in range(150)]
  stream = pipeline.stream(deal(made), 150)
  for batch in itertools.islice(expected, stop):
    assert_equal(next(stream), batch)
  resumed = pipeline.stream(deal(made), 150)
  resumed.set_state(stream.get_state())
  rest = list(resumed)
  assert len(rest) == 150 - stop
  for batch, known in zip(rest, expected[stop:]):
    assert_equal(batch, known)


@pytest.mark.parametrize("unit", ["tokens", "examples"])
def test_shares_of_processes_make_up_the_batch(made, unit):
  options = {"size": {"tokens": 90, "examples": 14}[unit], "unit": unit}
  whole = deal(made, multiple=6, **options)
  assert (whole.sizes % 6 == 0).all()
  shares = [
    deal(made, multiple=6, shard=BatchShard((i,), 3), **options)
    for i in range(3)
  ]
  for step in range(60):
    parts = [share[step] for share in shares]
    assert len({part.source.shape for part in parts}) == 1
    joined = jax.tree.map(lambda *rows: np.concatenate(rows), *parts)
    assert_equal(joined, whole[step])


def test_rows_are_tokens_then_eos_then_padding(made):
  batches = deal(made)
  known = {
    (rows, *shape)
    for rows, shape in zip(batches.sizes.tolist(), batches.shapes.tolist())
  }
  found = set()
  for step in range(60):
    batch = batches[step]
    rows, width = batch.source.shape
    found.add((rows, width, batch.target.shape[1]))
    for row in itertools.chain(*batch):
      assert row.dtype == np.int32
      (end,) = np.flatnonzero(row == EOS)
      assert (row[:end] > UNK).all()
      assert (row[end + 1 :] == PAD).all()
  assert len(found) > 2
  assert found <= known


def test_every_pair_is_read_as_often_as_any_other(made):
  batches = deal(made)
  pairs = set(zip(SOURCE, TARGET))
  count = Counter()
  for step in range(200):
    count.update(made.says(batches[step]))
    if step == 100:
      assert max(count.values()) - min(count[pair] for pair in pairs) <= 2
  assert count.keys() == pairs
  assert max(count.values()) - min(count.values()) <= 2
  assert min(count.values()) >= 2


def test_epochs_and_seeds_deal_otherwise(made):
  batches, other = deal(made), deal(made, seed=1)
  groups = [tuple(made.says(batches[step])) for step in range(100)]
  assert len(set(groups)) == len(groups)
  assert not set(groups) & {tuple(made.says(other[i])) for i in range(20)}


def test_padding_is_the_share_of_pad(made):
  batches = deal(made)
  lengths = made.corpus.pairs(0, 0, batches.shapes[-1]).lengths
  place = bucketing.assign(lengths, batches.shapes)
  counts = np.bincount(place, minlength=len(batches.sizes))
  first_epoch = [batches[i] for i in range((counts // batches.sizes).sum())]
  tokens = np.concatenate([np.ravel(s) for batch in first_epoch for s in batch])
  assert batches.padding() == pytest.approx((tokens == PAD).mean())
  assert f"{batches.padding():.1%} padding" in batches.describe()[1]
  # It does not depend on what was read, nor what is read on its being asked.
  assert_equal(batches[70], deal(made)[70])
  assert batches.padding() == pytest.approx((tokens == PAD).mean())


def test_sampled_pairs_are_new_in_every_epoch_and_none_is_too_long():
  made = make_corpus(**CASES["sampled"])
  best = TokenPairs(*map(made.tokenizer.encode, (SOURCE, TARGET)))
  longest = best.lengths.max(0)
  epochs = [made.corpus.pairs(0, epoch, longest) for epoch in range(3)]
  for pairs in epochs:
    assert (pairs.lengths <= longest).all()
    assert pairs.lengths.sum() > best.lengths.sum()
    for side, text in zip(pairs, (SOURCE, TARGET)):
      assert made.tokenizer.decode(side) == text
  for one, other in itertools.combinations(epochs, 2):
    differ = [[*a] != [*b] for a, b in zip(one.source, other.source)]
    assert np.mean(differ) > 0.2
  assert_equal(made.corpus.pairs(0, 2, longest), epochs[2])
  none_fits = made.corpus.pairs(0, 0, [1, 1])
  jax.tree.map(np.testing.assert_array_equal, none_fits, best)


def test_the_largest_shape_is_no_larger_than_the_first_epoch_needs():
  made = make_corpus(**CASES["sampled"])
  batches = deal(made)
  first = made.corpus.pairs(0, 0, [40, 40]).lengths.max(0)
  best = TokenPairs(*map(made.tokenizer.encode, (SOURCE, TARGET))).lengths.max(
    0
  )
  np.testing.assert_array_equal(batches.shapes[-1], np.maximum(first, best))
  assert batches.shapes.max() < 40


def test_batches_of_few_pairs_fill_over_epochs():
  made = make_corpus(SOURCE[:3], TARGET[:3])
  batches = deal(made, size=100)
  assert (batches.sizes > 3 * 3).all()
  count = Counter()
  for step in range(7):
    assert len(batches[step].source) == batches.sizes[0]
    count.update(made.says(batches[step]))
    assert max(count.values()) - min(count.values()) <= 1
  assert len(count) == 3
  assert_equal(deal(made, size=100)[6], batches[6])
  assert 0 <= batches.padding() < 0.5


def test_blank_and_long_pairs_are_left_out_and_counted():
  source = ["dog", "", "dog", "dog " * 5, "dog " * 4, "", "tree"]
  target = ["dog", "dog", "", "dog", "dog", "", "dog " * 9]
  corpus, _ = make_corpus(source, target, max_length=5)
  assert corpus.text == (["dog", "dog " * 4], ["dog", "dog"])
  assert (corpus.blank, corpus.too_long) == (3, 2)
  batches = corpus.training_batches(
    seed=0, size=60, unit="tokens", multiple=1, shard=ALONE
  )
  assert batches.describe()[0] == (
    "2 training pairs (3 blank and 2 over-long left out)"
  )


def test_where_nothing_is_left_it_is_told_why():
  with pytest.raises(UserError) as caught:
    make_corpus(
      ["dog dog", "dog", "tree"], ["dog", "", "dog tree"], max_length=2
    )
  assert str(caught.value) == (
    "config.data.train: of 3 pairs 1 are blank and 2 longer than"
    " config.data.max_length 2; none is left"
  )


def test_lengths_count_eos():
  pairs = TokenPairs([np.array([5, 6]), np.array([], int)], [np.array([7])] * 2)
  assert pairs.lengths.tolist() == [[3, 2], [1, 2]]
  assert TokenPairs([], []).lengths.shape == (0, 2)


def test_rows_may_be_empty_or_fill_their_width():
  rows = padded([np.array([], int), np.array([5, 6])], 3)
  assert rows.tolist() == [[EOS, PAD, PAD], [5, 6, EOS]]
