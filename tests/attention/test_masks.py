"""Masks and their operators, compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import attend, biases, masks
from attention.implementations.blockwise import Blockwise
from attention.masks.tile_visibility import Ranges, visibility

ROWS, COLUMNS = np.arange(5)[:, None], np.arange(7)[None, :]


def dense(mask, length=5, key_length=7):
  return np.asarray(jax.jit(lambda: mask.materialize(length, key_length))())


@pytest.mark.parametrize("offset", [-2, 0, 3])
def test_causal(offset):
  expected = ROWS + offset >= COLUMNS
  np.testing.assert_array_equal(dense(masks.causal(offset)), expected)
  traced = jax.jit(lambda offset: masks.causal(offset).materialize(5, 7))
  np.testing.assert_array_equal(traced(offset), expected)


@pytest.mark.parametrize(
  ("left", "right"), [(1, 2), (0, 0), (None, 1), (2, None), (None, None)]
)
def test_sliding_window(left, right):
  expected = np.ones((5, 7), bool)
  if left is not None:
    expected &= ROWS - left <= COLUMNS
  if right is not None:
    expected &= ROWS + right >= COLUMNS
  np.testing.assert_array_equal(
    dense(masks.sliding_window(left, right)), expected
  )


def test_padding_prefix_and_segments():
  lengths = jnp.array([0, 3, 7])
  expected = np.arange(7) < np.asarray(lengths)[:, None, None]
  expected = np.broadcast_to(expected, (3, 5, 7))
  np.testing.assert_array_equal(dense(masks.padding(lengths)), expected)
  np.testing.assert_array_equal(dense(masks.prefix(lengths)), expected)
  np.testing.assert_array_equal(dense(masks.prefix(3)), expected[1])
  query_ids, key_ids = np.array([[0, 0, 1, 1, 2]]), np.array([[0, 1, 1, 2] * 2])
  np.testing.assert_array_equal(
    dense(masks.segments(query_ids, key_ids[:, :7])),
    query_ids[:, :, None] == key_ids[:, None, :7],
  )


SIMPLE = st.one_of(
  st.integers(-3, 5).map(masks.causal),
  st.integers(0, 7).map(masks.prefix),
  st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
    lambda sides: masks.sliding_window(*sides)
  ),
  st.lists(st.integers(0, 7), min_size=2, max_size=2).map(
    lambda lengths: masks.padding(jnp.array(lengths))
  ),
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(left=SIMPLE, right=SIMPLE)
def test_algebra(left, right):
  both, either = left & right, left | right
  made = left, right, both, either, ~left, ~both, ~left | ~right
  a, b, *found = map(
    np.asarray, jax.jit(lambda: [each.materialize(5, 7) for each in made])()
  )
  expected = a & b, a | b, ~a, ~(a & b), ~a | ~b
  for got, want in zip(found, expected, strict=True):
    np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_arrays_combine_from_both_sides(make):
  array = make(np.random.default_rng(0).random((5, 7)) < 0.5)
  causal = COLUMNS <= ROWS
  for mask, expected in (
    (array & masks.causal(), array & causal),
    (masks.causal() & array, array & causal),
    (array | masks.causal(), array | causal),
    (masks.causal() | array, array | causal),
  ):
    assert isinstance(mask, masks.Mask)
    np.testing.assert_array_equal(dense(mask), expected)


def test_per_batch_parameters_line_up_with_arrays_of_more_axes():
  array = np.random.default_rng(1).random((2, 3, 5, 7)) < 0.5
  lengths = np.array([2, 6])
  expected = array & (np.arange(7) < lengths[:, None, None, None])
  mask = jnp.asarray(array) & masks.padding(jnp.asarray(lengths))
  np.testing.assert_array_equal(dense(mask), expected)


@pytest.mark.parametrize("shape", [(5, 7), (2, 1, 7), (5, 1), (7,), ()])
def test_blocks_equal_the_whole(shape):
  array = jnp.asarray(np.random.default_rng(2).random(shape) < 0.5)
  ids = jnp.array([[0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 2, 2]])
  mask = (
    masks.as_mask(array)
    & (masks.causal(1) | masks.segments(ids[:, :5], ids))
    & ~masks.padding(jnp.array([1, 2]))
  )
  whole = dense(mask)
  rank = whole.ndim - 2
  rows, columns = np.array([3, 4, 1]), np.array([2, 3, 6, 0])
  expected = whole[..., rows[:, None], columns]

  @jax.jit
  def blocks(traced_rows, traced_columns):
    return (
      mask.block(rows, columns, rank),
      mask.block(traced_rows, traced_columns, rank),
      mask.block(np.array([1, 2]), np.array([2, 3, 4]), rank),
    )

  *found, step = blocks(rows, columns)
  for block in found:
    np.testing.assert_array_equal(
      np.broadcast_to(block, expected.shape), expected
    )
  np.testing.assert_array_equal(
    np.broadcast_to(step, (*whole.shape[:-2], 2, 3)), whole[..., 1:3, 2:5]
  )


def test_shifted_rows():
  mask = masks.causal() & masks.sliding_window(2, None)
  whole = dense(mask, 7, 7)
  run = jax.jit(lambda offset: mask.shifted(offset).materialize(3, 7))
  np.testing.assert_array_equal(run(4), whole[4:])
  array = jnp.asarray(np.random.default_rng(3).random((7, 7)) < 0.5)
  both = (masks.as_mask(array) & mask).shifted(2) & masks.prefix(6)
  np.testing.assert_array_equal(
    dense(both, 3, 7), (np.asarray(array) & whole)[2:5] & (np.arange(7) < 6)
  )


@pytest.mark.parametrize("offset", [jnp.array([0, 5]), np.arange(2), 1.5])
def test_shifted_takes_one_integer(offset):
  with pytest.raises(ValueError, match="offset must be one integer"):
    masks.causal().shifted(offset)


def test_a_shift_may_be_larger_than_32_bits():
  shifted = masks.causal().shifted(2**40)
  np.testing.assert_array_equal(dense(shifted), dense(masks.causal(2**40)))


def test_integers_are_static_and_arrays_are_leaves():
  known = masks.causal(2) & masks.sliding_window(1, None)
  assert not jax.tree.leaves(known)
  assert len(jax.tree.leaves(masks.padding(jnp.array([1, 2])))) == 1
  rebuilt = jax.jit(lambda mask: mask)(known & masks.prefix(jnp.array(3)))
  np.testing.assert_array_equal(dense(rebuilt), dense(known & masks.prefix(3)))


def test_wrong_types_and_lengths_raise():
  with pytest.raises(AssertionError, match="key_lengths"):
    masks.padding(jnp.array([1.0]))
  with pytest.raises(AssertionError, match="query_ids"):
    masks.segments(jnp.array([0.5]), jnp.array([1]))
  with pytest.raises(TypeError, match="bias"):
    masks.causal() & jnp.zeros((5, 7))
  with pytest.raises(TypeError, match="mask"):
    masks.as_mask([True, False])
  with pytest.raises(ValueError, match=r"mask of shape .* does not broadcast"):
    masks.as_mask(jnp.ones((4, 7), bool)).materialize(5, 7)
  with pytest.raises(ValueError, match="query_ids"):
    masks.segments(jnp.arange(4), jnp.arange(7)).materialize(5, 7)
  with pytest.raises(AssertionError, match="key_ids must have an axis"):
    masks.segments(jnp.arange(3), 0)


@pytest.mark.parametrize(
  "joined",
  [
    lambda: masks.causal() and masks.padding(3),
    lambda: masks.causal() or masks.padding(3),
    lambda: not masks.causal(),
  ],
)
def test_boolean_keywords_raise(joined):
  with pytest.raises(TypeError, match=r"combine with &, \| and ~"):
    joined()


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint32"])
def test_every_integer_dtype_gives_the_same_mask(dtype):
  left = jnp.asarray(3, dtype)
  for got, want in (
    (masks.sliding_window(left, 0), masks.sliding_window(3, 0)),
    (masks.causal(left), masks.causal(3)),
  ):
    np.testing.assert_array_equal(
      got.materialize(9, 12), want.materialize(9, 12)
    )


def test_where_skips_the_tiles_that_it_hides():
  def near(query_positions, key_positions):
    distance = query_positions - key_positions
    return (distance >= 0) & (distance < 30)

  rows, columns = Ranges.cut(100, 10), Ranges.cut(120, 10)
  window, mask = masks.sliding_window(29, 0), masks.where(near)
  for offset in (0, 7):
    np.testing.assert_array_equal(
      visibility(mask.shifted(offset), rows, columns),
      visibility(window.shifted(offset), rows, columns),
    )
  ids = jnp.arange(120) // 40

  def same(query_positions, key_positions):
    return ids[query_positions] == ids[key_positions]

  expected = visibility(masks.segments(ids[:100], ids), rows, columns)
  tiles = jax.jit(lambda: visibility(masks.where(same), rows, columns))()
  np.testing.assert_array_equal(tiles, expected)
  np.testing.assert_array_equal(
    masks.where(near).materialize(9, 40), window.materialize(9, 40)
  )


def test_where_with_traced_arrays_computes_all_tiles():
  rows = columns = Ranges.cut(100, 10)

  def tiles(limit):
    mask = masks.where(lambda i, j: j < limit)
    return visibility(mask, rows, columns)

  assert (jax.jit(tiles)(30) == 1).all()
  assert (tiles(30)[:, 3:] == 0).all()


def test_where_equals_the_same_mask_in_tiles():
  tokens = np.random.default_rng(4).normal(size=(2, 23, 4)).astype("f4")
  slope = jnp.array([1, 2])[:, None, None]

  def per_head(query_positions, key_positions):
    return (query_positions - slope * key_positions) % 3 == 0

  mask = masks.where(per_head) & masks.causal()
  got, want = (
    jax.jit(
      lambda tokens, each=each: attend(
        tokens, tokens, tokens, mask=mask, implementation=each
      )
    )(tokens)
    for each in (Blockwise(query_block=5, key_block=4), "reference")
  )
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_where_rejects_what_is_no_mask():
  with pytest.raises(ValueError, match="must be a function"):
    masks.where(3)
  message = r"takes \(query_positions, key_positions\), got .* of \(q\)$"
  with pytest.raises(ValueError, match=message):
    masks.where(lambda q: q > 0)
  with pytest.raises(TypeError, match="booleans"):
    masks.where(lambda i, j: i - j).materialize(2, 2)


def test_where_explains_how_to_index_an_array():
  table, tokens = np.eye(700, dtype=bool), jnp.ones((700, 2))
  mask = masks.where(lambda i, j: table[i, j])

  @jax.jit
  def run(tokens):
    return attend(
      tokens, tokens, tokens, mask=mask.shifted(tokens.astype(int).min())
    )

  with pytest.raises(jax.errors.TracerArrayConversionError) as raised:
    run(tokens)
  assert "jnp.asarray(array)[index]" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
@pytest.mark.parametrize(
  "made", [masks.causal(), masks.sliding_window(1, 0), biases.alibi(1)]
)
def test_unsigned_positions_have_signed_distances(made, dtype):
  places = np.arange(4)
  got, want = (
    made.at(each, each).materialize(4, 4)
    for each in (places.astype(dtype), places)
  )
  np.testing.assert_array_equal(got, want)


class OddDistance(masks.Mask):
  """Its values are 0 and 1."""

  def block(self, rows, columns, rank):
    return (rows[:, None] - columns[None, :]) % 2


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("change", ["none", "inverted", "combined"])
def test_a_mask_of_the_user_must_have_booleans(change, implementation):
  mask, tokens = OddDistance(), jnp.ones((3, 2))
  if change == "inverted":
    mask = ~mask
  if change == "combined":
    mask = mask & masks.prefix(2)
  with pytest.raises(TypeError, match=r"must return booleans, .* int32"):
    attend(tokens, tokens, tokens, mask=mask, implementation=implementation)
