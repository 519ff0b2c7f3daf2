"""Biases, compared with the numbers and formulas of their papers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import biases
from attention.implementations import Blockwise, Pallas
from tests.attention.comparison import equations, jitted
from tests.attention.oracle import draw, single

attend = jitted(attention.attend)


def dense(bias, *lengths):
  return np.asarray(jax.jit(lambda: bias.materialize(*lengths))())


@pytest.mark.parametrize(
  ("num_heads", "slopes"),
  [
    (1, [2**-8]),
    (2, [2**-4, 2**-8]),
    (8, [2.0**-n for n in range(1, 9)]),
    (16, [2.0 ** (-n / 2) for n in range(1, 17)]),
    # The slopes of 8 heads, then every other slope of 16 heads.
    (
      12,
      [2.0**-n for n in range(1, 9)] + [2.0**-n for n in (0.5, 1.5, 2.5, 3.5)],
    ),
  ],
)
def test_alibi_slopes_equal_the_paper(num_heads, slopes):
  bias = dense(biases.alibi(num_heads), 3, 4)
  distance = abs(np.arange(4) - np.arange(3)[:, None])
  expected = -np.asarray(slopes)[:, None, None] * distance
  np.testing.assert_allclose(bias, expected, rtol=1e-6)


def t5_bucket(relative, num_buckets, bidirectional, max_distance):
  """The bucket of one distance, computed with integers."""
  bucket = 0
  if bidirectional:
    num_buckets //= 2
    bucket = num_buckets if relative > 0 else 0
    distance = abs(relative)
  else:
    distance = max(-relative, 0)
  exact = num_buckets // 2
  if distance < exact:
    return bucket + distance
  # Exact powers in integers: b(distance) is the largest with
  # exact * (max_distance / exact) ** (b / coarse) <= distance.
  coarse, step = num_buckets - exact, 0
  while step + 1 < coarse and exact**coarse * max_distance ** (
    step + 1
  ) <= distance**coarse * exact ** (step + 1):
    step += 1
  return bucket + exact + step


@pytest.mark.parametrize(
  ("num_buckets", "bidirectional", "max_distance"),
  [(32, True, 128), (32, False, 128), (8, True, 20), (5, False, 11)],
)
def test_t5_buckets(num_buckets, bidirectional, max_distance):
  table = np.arange(float(num_buckets))[:, None] * np.array([1.0, 10.0])
  length = 2 * max_distance
  bias = biases.relative_position(table, bidirectional, max_distance)
  # Rows in the middle have keys on both sides.
  rows = np.arange(max_distance - 3, max_distance + 3)
  block = np.asarray(jax.jit(lambda: bias.block(rows, np.arange(length), 1))())
  expected = [
    [
      t5_bucket(int(j - i), num_buckets, bidirectional, max_distance)
      for j in range(length)
    ]
    for i in rows
  ]
  np.testing.assert_array_equal(block[0], expected)
  np.testing.assert_array_equal(block[1], 10.0 * np.asarray(expected))


def test_t5_buckets_as_published_for_32_buckets():
  table = jnp.arange(32.0)[:, None]
  row = biases.relative_position(table).block(
    np.array([200]),
    np.array([200, 199, 193, 192, 184, 168, 72, 0, 201, 330]),
    1,
  )
  np.testing.assert_array_equal(row[0, 0], [0, 1, 7, 8, 10, 12, 15, 15, 17, 31])


def test_gradients_reach_the_table_and_arrays():
  query, key, value = draw(0, (2, 3, 4), (2, 5, 4), (2, 5, 2))
  table, array = draw(1, (8, 2), (3, 5))
  with jax.enable_x64(True):

    @jax.jit
    def loss(table, array):
      bias = array + biases.relative_position(table, max_distance=16)
      return jnp.sum(attend(query, key, value, bias=bias) ** 2)

    point = (jnp.asarray(table), jnp.asarray(array))
    gradient = jax.jit(jax.grad(loss, (0, 1)))(*point)
    for position in range(2):
      (direction,) = draw(2, point[position].shape)
      step = 1e-5
      ahead, behind = (
        loss(
          *(
            x + sign * step * direction if i == position else x
            for i, x in enumerate(point)
          )
        )
        for sign in (1, -1)
      )
      np.testing.assert_allclose(
        np.sum(gradient[position] * direction),
        (ahead - behind) / (2 * step),
        rtol=1e-6,
      )


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
def test_biases_add_with_arrays_from_both_sides(make):
  array = make(draw(3, (5, 7))[0].astype(np.float32))
  alibi = dense(biases.alibi(2), 5, 7)
  for bias in (biases.alibi(2) + array, array + biases.alibi(2)):
    assert isinstance(bias, biases.Bias)
    np.testing.assert_allclose(
      dense(bias, 5, 7), alibi + np.asarray(array), rtol=1e-6
    )


def test_biases_are_summed():
  alibi = dense(biases.alibi(2), 5, 7)
  bias = sum([biases.alibi(2), biases.alibi(2)])
  np.testing.assert_allclose(dense(bias, 5, 7), 2 * alibi, rtol=1e-6)


def test_shifted_rows_and_blocks():
  table = jnp.asarray(draw(4, (8, 2))[0], jnp.float32)
  array = jnp.asarray(draw(5, (2, 9, 9))[0], jnp.float32)
  bias = (
    biases.relative_position(table, max_distance=6) + biases.alibi(2) + array
  )
  whole = dense(bias, 9, 9)
  run = jax.jit(lambda offset: bias.shifted(offset).materialize(3, 9))
  np.testing.assert_allclose(run(4), whole[:, 4:7], rtol=1e-6)
  rows, columns = np.array([8, 1]), np.array([0, 3, 2])
  block = jax.jit(lambda *places: bias.block(*places, 1))(rows, columns)
  np.testing.assert_allclose(block, whole[:, rows[:, None], columns], rtol=1e-6)


def test_only_alibi_is_known_to_hide_nothing():
  alibi, array = biases.alibi(4), biases.as_bias(jnp.zeros((1, 5)))
  shown = [alibi, alibi * jnp.ones(4), -alibi + alibi, alibi.shifted(2)]
  assert not any(each.may_hide for each in shown)
  assert all(each.may_hide for each in (array, alibi + array, array * 2.0))


def test_minus_infinity_hides_keys_like_a_mask():
  query, key, value = draw(6, (3, 4), (5, 4), (5, 2))
  seen = np.array([[1, 0, 1, 1, 0], [0] * 5, [1] * 5], bool)
  numbers = np.where(seen, 0.5, -np.inf).astype(np.float32)
  by_bias = attend(query, key, value, bias=numbers, return_lse=True)
  by_mask = attend(
    query,
    key,
    value,
    mask=jnp.asarray(seen),
    bias=jnp.full((1, 1), 0.5),
    return_lse=True,
  )
  for got, want in zip(by_bias, by_mask, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
  "implementation", ["reference", "blockwise", Pallas(interpret=True)]
)
def test_a_table_of_relative_positions_may_hide_keys(implementation):
  query, key, value = single(5, *[(2, 9, 4)] * 3)
  (table,) = draw(6, (8, 2))
  table[4:] = -np.inf  # of all later keys
  bias = biases.relative_position(jnp.asarray(table), max_distance=5)

  @jax.jit
  def context(bias, value):
    return attend(query, key, value, bias=bias, implementation=implementation)

  value = value.at[:, 8].set(jnp.nan)  # hidden but from the last query
  got = context(bias, value)
  assert np.isfinite(got)[:, :8].all()
  want = context(dense(bias, 9, 9), value)
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  hidden = bias.shifted(-20)
  np.testing.assert_array_equal(context(hidden, value), 0.0)


def test_a_table_of_relative_positions_is_looked_up_once():
  tiles = Blockwise(query_block=4, key_block=4)

  def run(table, tokens):
    bias = biases.relative_position(table, max_distance=5)
    return attend(*(tokens,) * 3, bias=bias, implementation=tiles)

  program = jax.make_jaxpr(run)(jnp.ones((8, 1)), jnp.ones((1, 16, 4)))
  numbers = 1, 11  # of distances from -5 to 5
  outside = shapes(equations(program.jaxpr, without=["scan", "while"]))
  everywhere = shapes(equations(program.jaxpr))
  assert outside.count(numbers) == everywhere.count(numbers) == 1
  tile = 1, 4, 4  # of scores
  assert everywhere.count(tile) > outside.count(tile)


def shapes(operations):
  """The shapes of their results."""
  return [each.aval.shape for one in operations for each in one.outvars]


def test_invalid_arguments_raise():
  with pytest.raises(ValueError, match="num_heads"):
    biases.alibi(0)
  with pytest.raises(AssertionError, match="table"):
    biases.relative_position(jnp.ones(4))
  with pytest.raises(ValueError, match="max_distance"):
    biases.relative_position(jnp.ones((32, 2)), max_distance=8)
  with pytest.raises(TypeError, match="mask"):
    biases.as_bias(jnp.ones((2, 2), bool))
  with pytest.raises(TypeError, match="bias"):
    biases.as_bias(math.pi)


def test_a_bias_times_a_number_and_its_negative():
  alibi = biases.alibi(2)
  values = dense(alibi, 3, 4)
  for two in (2, np.int64(2), np.float32(2.0), jnp.float32(2.0)):
    np.testing.assert_allclose(dense(two * alibi, 3, 4), 2 * values)
  np.testing.assert_allclose(dense(-alibi, 3, 4), -values)
  array = jnp.ones((3, 4))
  np.testing.assert_allclose(dense(array - alibi, 3, 4), 1 - values)
  np.testing.assert_allclose(dense(alibi - array, 3, 4), values - 1)


def test_a_bias_times_one_number_per_head_is_differentiable():
  table = biases.as_bias(jnp.arange(12.0).reshape(3, 4))

  def total(factor):
    return jnp.sum((table * factor).materialize(3, 4))

  factor = jnp.array([0.5, 2.0])
  np.testing.assert_allclose(
    dense(factor * table, 3, 4),
    np.asarray(factor)[:, None, None] * np.arange(12.0).reshape(3, 4),
  )
  np.testing.assert_allclose(jax.jit(jax.grad(total))(factor), [66.0, 66.0])


def test_biases_are_divided_by_numbers_of_heads():
  table = biases.as_bias(jnp.arange(12.0).reshape(3, 4))
  np.testing.assert_allclose(
    dense(table / jnp.array([0.5, 2.0]), 3, 4),
    np.arange(12.0).reshape(3, 4) / np.array([0.5, 2.0])[:, None, None],
  )


@pytest.mark.parametrize("factor", [0.0, -1.0, 3.0])
def test_a_hidden_key_stays_hidden_whatever_the_factor(factor):
  bias = biases.as_bias(jnp.array([[0.0, -jnp.inf]]))
  np.testing.assert_array_equal(dense(factor * bias, 1, 2), [[0.0, -np.inf]])


def test_a_factor_that_is_no_number_raises():
  with pytest.raises(AssertionError, match="factor"):
    biases.alibi(2) * jnp.ones(2, int)
