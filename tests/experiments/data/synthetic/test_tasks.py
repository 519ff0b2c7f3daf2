"""Synthetic tasks: their targets, and the held-out examples."""

import numpy as np
import pytest

from experiments.data.batch import EOS, NUM_SPECIAL, PAD, append_eos, strip
from experiments.data.synthetic.tasks import DRAW, Task, held_out
from experiments.errors import UserError


def pairs(batch):
  """Sources and targets as lists of tokens, without EOS and padding."""
  return [
    (strip(source).tolist(), strip(target).tolist())
    for source, target in zip(batch.source, batch.target)
  ]


@pytest.fixture(params=sorted(DRAW))
def task(request):
  return Task(request.param, symbols=12, min_length=2, max_length=7)


def test_copy_answers_with_the_source():
  task = Task("copy", symbols=12, min_length=1, max_length=7)
  for source, target in pairs(task.training_batch(0, 0, 50)):
    assert target == source


def test_reverse_answers_with_the_source_backwards():
  task = Task("reverse", symbols=12, min_length=1, max_length=7)
  for source, target in pairs(task.training_batch(0, 0, 50)):
    assert target == source[::-1]


def test_lookup_answers_with_the_value_of_the_queried_key():
  task = Task("lookup", symbols=12, min_length=1, max_length=7)
  for source, target in pairs(task.training_batch(0, 0, 50)):
    *listed, query = source
    keys, values = listed[0::2], listed[1::2]
    assert len(set(keys)) == len(keys)
    assert not set(keys) & set(values)
    assert target == [dict(zip(keys, values))[query]]


def test_lengths_and_symbols_fill_their_ranges_and_no_more():
  task = Task("copy", symbols=5, min_length=3, max_length=6)
  sources = [source for source, _ in pairs(task.training_batch(0, 0, 500))]
  assert {len(source) for source in sources} == {3, 4, 5, 6}
  tokens = {token for source in sources for token in source}
  assert tokens == set(range(NUM_SPECIAL, NUM_SPECIAL + 5))
  assert task.vocabulary_size == NUM_SPECIAL + 5


def test_a_batch_depends_on_seed_and_step_alone(task):
  batch = task.training_batch(3, 7, 20)
  again = task.training_batch(3, 7, 20)
  np.testing.assert_array_equal(batch.source, again.source)
  np.testing.assert_array_equal(batch.target, again.target)
  for seed, step in ((3, 8), (4, 7)):
    other = task.training_batch(seed, step, 20)
    assert (batch.source != other.source).any()


def test_training_never_holds_a_held_out_source_and_evaluation_only_those(task):
  assert not held_out(task.training_batch(0, 0, 1000).source).any()
  assert held_out(task.evaluation_set(0, 200).source).all()


def test_evaluation_sets_differ_by_seed_and_name_and_stay_the_same(task):
  source = task.evaluation_set(0, 50, name="test").source
  again = task.evaluation_set(0, 50, name="test").source
  np.testing.assert_array_equal(source, again)
  for seed, name in ((1, "test"), (0, "validation")):
    other = task.evaluation_set(seed, 50, name=name).source
    assert (source != other).any()


def test_about_one_source_in_sixteen_is_held_out():
  rng = np.random.default_rng(0)
  lengths = rng.integers(5, 20, size=20_000)
  share = held_out(DRAW["copy"](rng, lengths, 20, 50).source).mean()
  assert 0.055 < share < 0.07


def test_padding_does_not_change_what_is_held_out():
  source = Task("copy", 12, 1, 7).training_batch(0, 0, 100).source
  wider = np.pad(source, ((0, 0), (0, 5)))
  np.testing.assert_array_equal(held_out(source), held_out(wider))


def test_width_pads_without_changing_lengths(task):
  wide = Task(task.name, 12, 2, 7, width=11)
  batch = wide.training_batch(0, 0, 30)
  assert (batch.source.shape[1], batch.target.shape[1]) == wide.batch_lengths
  longest = max(len(source) for source, _ in pairs(batch))
  assert longest == (15 if task.name == "lookup" else 7)


def test_a_task_too_small_to_split_says_so():
  with pytest.raises(UserError, match="too few different sequences"):
    Task("copy", symbols=1, min_length=1, max_length=1).evaluation_set(0, 4)


def test_words_count_symbols_from_zero():
  words = Task("copy", 12, 1, 7).words(np.array([NUM_SPECIAL, 14, EOS, PAD]))
  assert words == ["0", "11", "</s>", "<pad>"]


def test_append_eos_and_strip_are_inverse():
  tokens = np.array([[5, 6, 7], [8, 9, 3]])
  rows = append_eos(tokens, np.array([3, 0]))
  assert [strip(row).tolist() for row in rows] == [[5, 6, 7], []]
