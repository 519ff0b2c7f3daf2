"""Training batches of a corpus: a function of (text, seed, step) alone."""

import itertools
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

from configs import base
from experiments.config import TextConfig, TrainConfig
from experiments.data.batch import EOS, PAD, UNK
from experiments.data.dataset import BatchShard
from experiments.data.text import bucketing, tokenized
from experiments.data.text.corpus import BucketedBatches, ParallelCorpus, padded
from experiments.data.text.tokenizer import Tokenizer, train
from experiments.errors import UserError

NOUNS = ("dog", "horse", "river", "mountain", "tree")
SOURCE = [
  " ".join(words)
  for count in range(2, 5)
  for words in itertools.permutations(NOUNS, count)
]
TARGET = [line[::-1] for line in SOURCE]


class Made(NamedTuple):
  """A corpus and its tokenizer."""

  corpus: ParallelCorpus
  tokenizer: Tokenizer

  def pairs(self, batch):
    """The sentence pairs of a batch."""
    return list(zip(*map(self.tokenizer.decode, batch)))


def make_corpus(source=SOURCE, target=TARGET, kind="words", max_length=40):
  tokenizer = base.tokenizer(kind, 60)
  config = TextConfig(
    **base.text().to_dict()
    | {"source_tokenizer": tokenizer, "target_tokenizer": tokenizer}
    | {"joint_vocabulary": False, "max_length": max_length, "num_shapes": 4}
  )
  trained = train(
    [*SOURCE, *TARGET], config.source_tokenizer, fields=["config.data"]
  )
  with tempfile.TemporaryDirectory() as folder:
    tokenized.write(
      zip(source, target), len(source), (trained, trained), Path(folder)
    )
    tokens = tokenized.TokenizedPairs(Path(folder), np.dtype(np.uint16))
  return Made(ParallelCorpus(tokens, config), trained)


@pytest.fixture(scope="module", params=["words", "bpe"])
def made(request):
  return make_corpus(kind=request.param)


def training_batches(corpus, *, seed=0, size=60):
  train = TrainConfig(batch_size=size, batch_unit="tokens", row_multiple=1)
  return BucketedBatches(corpus, train, seed, BatchShard())


def assert_equal(ours, theirs):
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_rows_are_tokens_eos_padding(made):
  batches = training_batches(made.corpus)
  known = {
    (rows, *shape)
    for rows, shape in zip(batches.sizes.tolist(), batches.shapes.tolist())
  }
  shapes_seen = set()
  for step in range(60):
    batch = batches[step]
    rows, width = batch.source.shape
    shapes_seen.add((rows, width, batch.target.shape[1]))
    for row in itertools.chain(*batch):
      assert row.dtype == np.int32
      (end,) = np.flatnonzero(row == EOS)
      assert (row[:end] > UNK).all()
      assert (row[end + 1 :] == PAD).all()
  assert len(shapes_seen) > 2
  assert shapes_seen <= known


def test_every_pair_is_read_equally_often(made):
  batches = training_batches(made.corpus)
  pairs = set(zip(SOURCE, TARGET))
  count = Counter()
  for step in range(200):
    count.update(made.pairs(batches[step]))
    if step == 100:
      assert max(count.values()) - min(count[pair] for pair in pairs) <= 2
  assert count.keys() == pairs
  assert max(count.values()) - min(count.values()) <= 2
  assert min(count.values()) >= 2


def test_epochs_and_seeds_give_different_batches(made):
  batches, other = (
    training_batches(made.corpus),
    training_batches(made.corpus, seed=1),
  )
  groups = [tuple(made.pairs(batches[step])) for step in range(100)]
  assert len(set(groups)) == len(groups)
  assert not set(groups) & {tuple(made.pairs(other[i])) for i in range(20)}


def test_padding_is_the_share_of_pad(made):
  batches = training_batches(made.corpus)
  lengths = made.corpus.lengths
  place = bucketing.assign(lengths, batches.shapes)
  counts = np.bincount(place, minlength=len(batches.sizes))
  first_epoch = [batches[i] for i in range((counts // batches.sizes).sum())]
  tokens = np.concatenate([np.ravel(s) for batch in first_epoch for s in batch])
  assert batches.padding() == pytest.approx((tokens == PAD).mean())
  assert f"{batches.padding():.1%} padding" in batches.describe()[1]
  # Neither depends on the other.
  assert_equal(batches[70], training_batches(made.corpus)[70])
  assert batches.padding() == pytest.approx((tokens == PAD).mean())


def test_batches_larger_than_an_epoch_span_epochs():
  made = make_corpus(SOURCE[:3], TARGET[:3])
  batches = training_batches(made.corpus, size=100)
  assert (batches.sizes > 3 * 3).all()
  count = Counter()
  for step in range(7):
    assert len(batches[step].source) == batches.sizes[0]
    count.update(made.pairs(batches[step]))
    assert max(count.values()) - min(count.values()) <= 1
  assert len(count) == 3
  assert_equal(training_batches(made.corpus, size=100)[6], batches[6])
  assert 0 <= batches.padding() < 0.5


def test_blank_and_long_pairs_are_left_out_and_counted():
  source = ["dog", "", "dog", "dog " * 5, "dog " * 4, "", "tree"]
  target = ["dog", "dog", "", "dog", "dog", "", "dog " * 9]
  corpus, tokenizer = make_corpus(source, target, max_length=5)
  pairs = [tokenizer.decode(corpus[index]) for index in range(len(corpus))]
  assert pairs == [["dog", "dog"], ["dog dog dog dog", "dog"]]
  assert corpus.lengths.tolist() == [[2, 2], [5, 2]]
  assert (corpus.blank, corpus.too_long) == (3, 2)
  assert training_batches(corpus).describe()[0] == (
    "2 training pairs (3 blank and 2 too long left out)"
  )


def test_corpus_without_usable_pairs_is_refused():
  with pytest.raises(UserError) as caught:
    make_corpus(
      ["dog dog", "dog", "tree"], ["dog", "", "dog tree"], max_length=2
    )
  assert str(caught.value) == (
    "config.data.train: of 3 pairs 1 are blank and 2 longer than"
    " config.data.max_length 2; none is left"
  )


def test_padded_rows_may_be_empty_or_full():
  rows = padded([np.array([], int), np.array([5, 6])], 3)
  assert rows.tolist() == [[EOS, PAD, PAD], [5, 6, EOS]]
