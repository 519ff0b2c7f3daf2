"""Synthetic tasks: their targets, and the held-out examples."""

import numpy as np
import pytest

from experiments.config import LengthRange, TaskConfig, TrainConfig
from experiments.data.batch import EOS, NUM_SPECIAL, PAD, append_eos, strip
from experiments.data.dataset import BatchShard
from experiments.data.synthetic.dataset import SyntheticDataset
from experiments.data.synthetic.tasks import DRAW, held_out
from experiments.errors import UserError


def make_task(name, symbols=12, min_length=1, max_length=7, **splits):
  lengths = {"min_length": min_length, "max_length": max_length}
  wanted = LengthRange(**lengths, num_examples=200)
  splits = dict.fromkeys(("validation", "test"), wanted) | splits
  return SyntheticDataset(
    TaskConfig(name=name, symbols=symbols, **lengths, splits=splits)
  )


def training_batch(task, seed, step, size):
  train = TrainConfig(batch_size=size)
  return task.training_batches(train, seed=seed, shard=BatchShard())[step]


def pairs(batch):
  """Sources and targets as lists of tokens, without EOS and padding."""
  return [
    (strip(source).tolist(), strip(target).tolist())
    for source, target in zip(batch.source, batch.target)
  ]


@pytest.fixture(params=sorted(DRAW))
def task(request):
  return make_task(request.param, min_length=2)


def test_target_of_copy_is_the_source():
  task = make_task("copy")
  for source, target in pairs(training_batch(task, 0, 0, 50)):
    assert target == source


def test_target_of_reverse_is_the_source_backwards():
  task = make_task("reverse")
  for source, target in pairs(training_batch(task, 0, 0, 50)):
    assert target == source[::-1]


def test_target_of_lookup_is_the_value_of_the_queried_key():
  task = make_task("lookup")
  for source, target in pairs(training_batch(task, 0, 0, 50)):
    *listed, query = source
    keys, values = listed[0::2], listed[1::2]
    assert len(set(keys)) == len(keys)
    assert not set(keys) & set(values)
    assert target == [dict(zip(keys, values))[query]]


def test_lengths_and_symbols_fill_their_ranges_and_no_more():
  task = make_task("copy", symbols=5, min_length=3, max_length=6)
  sources = [source for source, _ in pairs(training_batch(task, 0, 0, 500))]
  assert {len(source) for source in sources} == {3, 4, 5, 6}
  tokens = {token for source in sources for token in source}
  assert tokens == set(range(NUM_SPECIAL, NUM_SPECIAL + 5))
  assert task.target_vocabulary_size == NUM_SPECIAL + 5


def test_a_batch_depends_on_seed_and_step_alone(task):
  batch = training_batch(task, 3, 7, 20)
  again = training_batch(task, 3, 7, 20)
  np.testing.assert_array_equal(batch.source, again.source)
  np.testing.assert_array_equal(batch.target, again.target)
  for seed, step in ((3, 8), (4, 7)):
    other = training_batch(task, seed, step, 20)
    assert (batch.source != other.source).any()


def test_training_never_holds_a_held_out_source_and_evaluation_only_those(task):
  assert not held_out(training_batch(task, 0, 0, 1000).source).any()
  assert held_out(task.evaluation_set("test").batch.source).all()


def test_evaluation_sets_differ_by_seed_and_name_and_stay_the_same(task):
  source = task.evaluation_set("test").batch.source
  again = task.evaluation_set("test").batch.source
  np.testing.assert_array_equal(source, again)
  config = task.config.model_copy(update={"evaluation_seed": 1})
  for other in (
    SyntheticDataset(config).evaluation_set("test"),
    task.evaluation_set("validation"),
  ):
    assert (source != other.batch.source).any()


def test_about_one_source_in_sixteen_is_held_out():
  rng = np.random.default_rng(0)
  lengths = rng.integers(5, 20, size=20_000)
  share = held_out(DRAW["copy"](rng, lengths, 20, 50).source).mean()
  assert 0.055 < share < 0.07


def test_padding_does_not_change_what_is_held_out():
  source = training_batch(make_task("copy"), 0, 0, 100).source
  wider = np.pad(source, ((0, 0), (0, 5)))
  np.testing.assert_array_equal(held_out(source), held_out(wider))


def test_width_pads_without_changing_lengths(task):
  longer = LengthRange(min_length=8, max_length=11, num_examples=9)
  wide = make_task(task.config.name, min_length=2, longer=longer)
  batch = wide.evaluation_set("test").batch
  assert max(batch.source.shape[1], batch.target.shape[1]) == wide.max_length
  longest = max(len(source) for source, _ in pairs(batch))
  assert longest == (15 if wide.config.name == "lookup" else 7)


def test_a_task_too_small_to_split_says_so():
  config = make_task("copy", max_length=1).config
  config = config.model_copy(update={"symbols": 1})
  with pytest.raises(UserError, match="too few different sequences"):
    SyntheticDataset(config).evaluation_set("test")


def test_words_count_symbols_from_zero():
  tokens = np.array([NUM_SPECIAL, 14, EOS, PAD])
  words = make_task("copy").source_words(tokens)
  assert words == ["0", "11", "</s>", "<pad>"]


def test_append_eos_and_strip_are_inverse():
  tokens = np.array([[5, 6, 7], [8, 9, 3]])
  rows = append_eos(tokens, np.array([3, 0]))
  assert [strip(row).tolist() for row in rows] == [[5, 6, 7], []]
