"""Buckets: little padding, and every example once an epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.config import TrainConfig
from experiments.data.text.bucketing import (
  assign,
  batch_sizes,
  choose_shapes,
  plan_epoch,
)

PAIRS = st.lists(
  st.tuples(st.integers(1, 90), st.integers(1, 90)), min_size=1, max_size=60
).map(np.array)


def tokens(size, multiple):
  return TrainConfig(
    batch_size=size, batch_unit="tokens", row_multiple=multiple
  )


def padded_tokens(lengths, shapes):
  return shapes[assign(lengths, shapes)].sum()


def captions(count, seed=0):
  """Lengths like those of Multi30k's captions in subwords."""
  covariance = 25 * np.array([[1, 0.85], [0.85, 1]])
  rng = np.random.default_rng(seed)
  drawn = rng.multivariate_normal([15, 15], covariance, count)
  return drawn.round().astype(int).clip(4, 50)


@settings(deadline=None, max_examples=60)
@given(PAIRS)
def test_shapes_hold_all_examples_and_more_shapes_pad_less(lengths):
  before = np.inf
  for count in range(1, 9):
    shapes = choose_shapes(lengths, count)
    assert len(shapes) <= count
    assert len(np.unique(shapes, axis=0)) == len(shapes)
    np.testing.assert_array_equal(shapes[-1], lengths.max(0))
    assert (lengths <= shapes[assign(lengths, shapes)]).all()
    padded = padded_tokens(lengths, shapes)
    assert padded <= before
    before = padded
  enough = choose_shapes(lengths, 10_000)
  if max(len(np.unique(side)) for side in lengths.T) <= 64:
    assert padded_tokens(lengths, enough) == lengths.sum()


def test_second_shape_is_the_best_possible():
  lengths = captions(300)
  shapes = choose_shapes(lengths, 2)
  largest = lengths.max(0)
  best = min(
    padded_tokens(lengths, np.array([[source, target], largest]))
    for source in range(1, largest[0] + 1)
    for target in range(1, largest[1] + 1)
  )
  assert padded_tokens(lengths, shapes) == best


@pytest.mark.parametrize("seed", range(3))
def test_twelve_shapes_pad_captions_by_less_than_a_tenth(seed):
  lengths = captions(29_000, seed)
  shapes = choose_shapes(lengths, 12)
  assert len(shapes) == 12
  padding = 1 - lengths.sum() / padded_tokens(lengths, shapes)
  assert 0.05 < padding < 0.10


def test_uniform_lengths_get_even_shapes():
  lengths = np.stack([np.arange(1, 1001)] * 2, 1)
  shapes = choose_shapes(lengths, 4)
  even = np.array([[250], [500], [750], [1000]])
  assert np.abs(shapes - even).max() < 90


def test_example_belongs_to_the_first_shape_that_holds_it():
  shapes = np.array([[2, 8], [6, 5], [9, 9]])
  lengths = np.array([[2, 8], [2, 5], [3, 5], [3, 6], [7, 1], [9, 9]])
  assert assign(lengths, shapes).tolist() == [0, 0, 1, 2, 2, 2]


@settings(deadline=None)
@given(PAIRS, st.integers(1, 5000), st.integers(1, 24))
def test_batches_have_as_many_tokens_as_fit(shapes, size, multiple):
  rows = batch_sizes(shapes, tokens(size, multiple))
  assert (rows % multiple == 0).all()
  assert (rows >= multiple).all()
  longest = shapes.max(1)
  assert ((rows * longest <= size) | (rows == multiple)).all()
  assert ((rows + multiple) * longest > size).all()
  examples = TrainConfig(batch_size=size, batch_unit="examples")
  assert (batch_sizes(shapes, examples) == size).all()


@settings(deadline=None)
@given(PAIRS, st.integers(1, 5), st.integers(1, 9))
def test_lengths_of_shapes_are_multiples(lengths, num_shapes, multiple):
  shapes = choose_shapes(lengths, num_shapes, multiple)
  assert len(shapes) <= num_shapes
  assert (shapes % multiple == 0).all()
  # The largest shape holds all examples, and no more than is needed.
  longest = lengths.max(0)
  assert ((shapes[-1] >= longest) & (shapes[-1] < longest + multiple)).all()


@settings(deadline=None, max_examples=60)
@given(PAIRS, st.integers(1, 5), st.integers(1, 70), st.integers(0, 99))
def test_every_example_is_planned_once_an_epoch_except_leftovers(
  lengths, num_shapes, size, seed
):
  shapes = choose_shapes(lengths, num_shapes)
  sizes = batch_sizes(shapes, tokens(size, 1))
  rng = np.random.default_rng(seed)
  planned, left = np.zeros(len(lengths), int), np.array([], int)
  place = assign(lengths, shapes)
  members = np.bincount(place, minlength=len(shapes))
  for epoch in range(1, 8):
    plan = plan_epoch(lengths, shapes, sizes, left, rng)
    left = plan.leftover
    assert len(plan.shapes) == len(plan.examples)
    for shape, rows in zip(plan.shapes, plan.examples):
      assert len(rows) == sizes[shape]
      assert (lengths[rows] <= shapes[shape]).all()
      planned += np.bincount(rows, minlength=len(lengths))
    waiting = np.bincount(left, minlength=len(lengths))
    np.testing.assert_array_equal(planned + waiting, epoch)
    # No example is left over twice in a row if its shape can fill a batch.
    assert set(waiting[members[place] >= sizes[place]]) <= {0, 1}
    assert (np.bincount(place[left], minlength=len(sizes)) < sizes).all()


def plan_captions(seed):
  lengths = captions(500)
  shapes = choose_shapes(lengths, 4)
  sizes = batch_sizes(shapes, tokens(200, 2))
  rng = np.random.default_rng(seed)
  return lengths, plan_epoch(lengths, shapes, sizes, np.array([], int), rng)


def test_epoch_depends_on_its_rng_alone():
  (_, first), (_, again), (_, other) = map(plan_captions, (3, 3, 4))
  np.testing.assert_equal(first, again)
  assert first.shapes.tolist() != other.shapes.tolist()
  for shape in range(4):
    groups = [
      {frozenset(rows) for at, rows in zip(*plan[:2]) if at == shape}
      for plan in (first, other)
    ]
    assert groups[0] != groups[1]


def test_batches_are_not_ordered_by_length():
  lengths, plan = plan_captions(0)
  means = [lengths[rows].mean() for rows in plan.examples]
  assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.3
  assert len(set(np.diff(plan.shapes).tolist())) > 3
