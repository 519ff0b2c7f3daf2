"""Rounding and overflow of blockwise attention, against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import masks, scores
from attention.implementations.blockwise import Blockwise
from attention.scores import additive_kernel
from tests.attention.comparison import close, jitted
from tests.attention.oracle import (
  CASES,
  draw,
  draw_parameters,
  loop_attend,
  single,
)
from tests.matrix import sampled

attend = jitted(attention.attend)
SMALL = Blockwise(query_block=3, key_block=4)
TILES = Blockwise(query_block=128, key_block=128)


def float32(*arrays):
  return [jnp.asarray(np.asarray(array, np.float32)) for array in arrays]


def run(query, key, value, implementation=SMALL, **arguments):
  """Context, lse, and the gradients of query, key, value and bias."""
  bias = arguments.pop("bias", None)

  def loss(query, key, value, bias):
    context, lse = attend(
      query,
      key,
      value,
      bias=bias,
      implementation=implementation,
      return_lse=True,
      **arguments,
    )
    seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
    return jnp.sum(jnp.sin(context)) + jnp.sum(seen), (context, lse)

  numbers = (0, 1, 2) if bias is None else (0, 1, 2, 3)
  gradients, outputs = jax.jit(jax.grad(loss, numbers, has_aux=True))(
    query, key, value, bias
  )
  return outputs, gradients


def check(got, want, rtol=1e-5, atol=1e-5):
  close(got, want, rtol, atol)


def dense(query, key, value, bias=0.0, mask=None):
  """Context and lse of the dot score in float64."""
  query, key, value, bias = (
    np.asarray(array, np.float64) for array in (query, key, value, bias)
  )
  table = query @ np.swapaxes(key, -1, -2) + bias
  return loop_attend(table, value, mask)[:2]


@sampled("sign", [1.0, -1.0], default=[-1.0])
@sampled("name", ["dot", "general", "closure", "own"], default=["dot"])
def test_scores_of_ten_thousand(name, sign):
  query, key, value = single(0, (7, 4), (11, 4), (11, 2))
  case = CASES[name]
  parameters = draw_parameters(case, 4, dtype=jnp.float32)
  size = 100.0 if name in ("dot", "general", "closure") else 1e4
  query, key = sign * size * query, size * key
  score = case.bound(parameters)
  table = np.asarray(score(query, key), np.float64)
  assert abs(table).max() > 1e4
  outputs, gradients = run(query, key, value, score=score)
  expected = loop_attend(table, np.asarray(value, np.float64))
  # A score of 1e4 is rounded to 1e-3 in float32, and so are the weights.
  check(outputs, expected[:2], rtol=1e-5, atol=3e-2)
  assert all(jnp.isfinite(leaf).all() for leaf in gradients)


def test_rows_masked_in_some_tiles_or_in_all():
  query, key, value = single(1, (7, 4), (13, 4), (13, 2))
  seen = np.random.default_rng(2).random((7, 13)) < 0.5
  seen[0, :4] = seen[1, 4:8] = seen[2, :8] = seen[3, 8:] = False
  seen[4], seen[5, :12] = False, False  # no key; a key of the last tile
  seen[5, 12] = True
  mask = jnp.asarray(seen)
  outputs, gradients = run(query, key, value, mask=mask, score=scores.dot())
  check(outputs, dense(query, key, value, mask=seen))
  assert not outputs[0][4].any()
  assert outputs[1][4] == -np.inf
  check(
    gradients,
    run(query, key, value, "reference", mask=mask, score=scores.dot())[1],
  )
  assert not gradients[0][4].any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", [1, 3, 7])
def test_first_tile_may_be_fully_masked(length):
  # The mask is traced, so no tile is known to be empty.
  query, key, value = single(3, (length, 4), (13, 4), (13, 2))
  query = 30.0 * query

  @jax.jit
  def traced(first):
    mask = ~masks.prefix(first)
    return run(query, key, value, mask=mask, score=scores.dot())

  for first in (4, 8, 12):
    outputs, gradients = traced(first)
    seen = np.broadcast_to(np.arange(13) >= first, (length, 13))
    check(outputs, dense(query, key, value, mask=seen), atol=1e-4)
    assert all(jnp.isfinite(leaf).all() for leaf in gradients)
    assert not gradients[1][:first].any()


@sampled("where", [0, 5, 10], default=[5])
def test_one_huge_key_receives_all_the_weight(where):
  query, key, value = single(4, (7, 4), (11, 4), (11, 2))
  key = key.at[where].set(1e15)
  query = jnp.abs(query).at[2].multiply(-1.0)
  (context, lse), gradients = run(query, key, value, score=scores.dot())
  others = np.array([0, 1, 3, 4, 5, 6])
  check(context[others], np.broadcast_to(value[where], (6, 2)), 1e-6)
  kept = np.delete(np.arange(11), where)
  check(
    (context[2], lse[2]),
    tuple(each[0] for each in dense(query[2:3], key[kept], value[kept])),
  )
  assert all(jnp.isfinite(leaf).all() for leaf in gradients)


@pytest.mark.exhaustive
def test_minus_infinity_in_a_bias_equals_a_mask():
  query, key, value, bias = single(
    5, (2, 7, 4), (2, 13, 4), (2, 13, 2), (7, 13)
  )
  hidden = np.random.default_rng(6).random((7, 13)) < 0.4
  hidden[2], hidden[3, :8], hidden[5, 4:] = True, True, True
  outputs, gradients = run(
    query,
    key,
    value,
    score=scores.dot(),
    bias=jnp.where(hidden, -jnp.inf, bias),
  )
  masked = run(
    query, key, value, score=scores.dot(), bias=bias, mask=jnp.asarray(~hidden)
  )
  check(outputs, dense(query, key, value, bias, ~hidden))
  check((outputs, gradients), masked, 1e-6, 1e-6)
  assert not gradients[3][hidden].any()


@pytest.mark.parametrize("name", ["scaled_dot", "additive"])
def test_bfloat16_with_long_rows(name):
  query, key, value = draw(
    8, (3, 16), (4096, 16), (4096, 2), dtype=jnp.bfloat16
  )
  case = CASES[name]
  parameters = draw_parameters(case, 16, dtype=jnp.bfloat16)
  context, lse = attend(
    query,
    key,
    value + jnp.bfloat16(1.0),
    score=case.bound(parameters),
    implementation=TILES,
    return_lse=True,
  )
  with jax.enable_x64(True):
    wide = [np.asarray(x, np.float64) for x in (query, key)]
    parameters = {n: np.asarray(a, np.float64) for n, a in parameters.items()}
    table = np.asarray(case.bound(parameters)(*wide))
  largest = table.max(axis=-1, keepdims=True)
  weights = np.exp(table - largest)
  total = weights.sum(axis=-1, keepdims=True)
  values = np.asarray(value + jnp.bfloat16(1.0), np.float64)
  expected = weights / total @ values
  np.testing.assert_allclose(
    np.asarray(context, np.float64), expected, atol=0.02
  )
  np.testing.assert_allclose(
    lse,
    (largest + np.log(total))[:, 0],
    atol=0.02 if name == "scaled_dot" else 0.05,
  )


@sampled("key_length", [1, 11, 1000], default=[11])
def test_identical_keys_have_exactly_equal_weights(key_length):
  query, key = single(9, (3, 4), (1, 4))
  key = jnp.broadcast_to(key, (key_length, 4))
  ones = jnp.ones((key_length, 1))
  context, lse = attend(query, key, ones, implementation=SMALL, return_lse=True)
  np.testing.assert_array_equal(context, np.ones((3, 1)))
  weights = attend(query, key, jnp.eye(key_length), implementation=SMALL)
  np.testing.assert_array_equal(
    weights, np.full((3, key_length), np.float32(1.0 / key_length))
  )
  np.testing.assert_allclose(
    lse, query @ key[0] / 2.0 + np.log(key_length), rtol=1e-5
  )


@sampled("size", [0.1, 3.0, 20.0, 60.0], default=[60.0])
@sampled("lengths", [(9, 17), (33, 40), (1, 40)], default=[(33, 40)])
def test_additive_score_equals_hyperbolic_tangent(size, lengths):
  query, key = (
    size * np.random.default_rng(n).uniform(-1, 1, (length, 256)).astype("f4")
    for n, length in enumerate(lengths)
  )
  # Sums of query and key near 0, where tanh is steep and terms cancel.
  (noise,) = single(11, (5, 256))
  key[: len(query[:5])] = np.clip(noise[: len(query)] - query[:5], -60.0, 60.0)
  (weight,) = single(12, (256,))
  eye = jnp.eye(256)
  score = scores.additive(eye, eye, weight)

  @jax.jit
  def run(query, key):
    table, pull = jax.vjp(score, query, key)
    _, lse = attention.attend(
      query, key, key, score=score, implementation=SMALL, return_lse=True
    )
    return table, lse, pull(jnp.ones_like(table))

  found, lse, gradients = run(query, key)
  wide = [np.asarray(array, np.float64) for array in (query, key, weight)]
  table = np.tanh(wide[0][:, None] + wide[1][None]) @ wide[2]
  atol = 1e-5
  np.testing.assert_allclose(found, table, rtol=0.0, atol=atol)
  np.testing.assert_allclose(
    lse, loop_attend(table, wide[1])[1], rtol=1e-6, atol=atol
  )

  slopes = (1.0 - np.tanh(wide[0][:, None] + wide[1][None]) ** 2) * wide[2]
  check(gradients, (slopes.sum(axis=1), slopes.sum(axis=0)), 1e-4, 10 * atol)


@pytest.mark.exhaustive
@pytest.mark.parametrize("length", [8, 64, 128])
@pytest.mark.parametrize(
  "leading",
  [((2, 3), (2, 1), (3,)), ((3,), (3,), ()), ((), (2,), ()), ((), (), (2,))],
)
def test_derivatives_of_additive_scores_of_several_heads(leading, length):
  shapes = (
    (*axes, *rest)
    for axes, rest in zip(leading, ((length, 20), (length + 2, 20), (20,)))
  )
  point = single(14, *shapes)
  direction = single(15, *(array.shape for array in point))

  def plain(query, key, weight):
    hidden = jnp.tanh(query[..., :, None, :] + key[..., None, :, :])
    return jnp.sum(hidden * weight[..., None, None, :], axis=-1)

  def fast(query, key, weight):
    return additive_kernel.weighted_tanh_sum(query, key, weight)

  @functools.partial(jax.jit, static_argnums=0)
  def derivatives(function, point, direction):
    def total(*point):
      return jnp.sum(jnp.sin(function(*point)))

    gradient = jax.grad(total, (0, 1, 2))
    return (
      jax.jvp(function, point, direction),
      jax.jvp(lambda *point: gradient(*point), point, direction),
    )

  with jax.numpy_rank_promotion("allow"):
    expected = derivatives(plain, point, direction)
  found = derivatives(fast, point, direction)
  for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
    scale = float(jnp.abs(other).max())
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * scale)


def test_scaled_dot_of_512_tokens_has_only_float32_rounding_errors():
  query, key, value = draw(13, (512, 64), (512, 64), (512, 64))
  table = query @ key.T / 8.0
  weights = np.exp(table - table.max(axis=-1, keepdims=True))
  weights /= weights.sum(axis=-1, keepdims=True)
  for implementation in ("blockwise", TILES):
    context = attend(*float32(query, key, value), implementation=implementation)
    assert abs(context - weights @ value).max() <= 2e-6


LIMITS = [
  (masks.sliding_window(2**31 - 1, 0), masks.causal()),
  (masks.sliding_window(2**40, 0), masks.causal()),
  (masks.sliding_window(2**31, 2**31), masks.prefix(7)),
  (masks.sliding_window(-(2**40), None), masks.prefix(0)),
  (masks.causal(2**31 - 1), masks.prefix(7)),
  (masks.causal(2**31), masks.prefix(7)),
  (masks.causal(-(2**40)), masks.prefix(0)),
  (masks.causal(jnp.asarray(2**31 - 1)), masks.prefix(7)),
  (masks.prefix(2**31 - 1), masks.prefix(7)),
  (masks.prefix(2**40), masks.prefix(7)),
  (masks.padding(jnp.asarray([2**31 - 1])), masks.prefix(7)),
]


@sampled(("mask", "plain"), LIMITS, default=LIMITS[:1])
@sampled("implementation", ["reference", SMALL], default=[SMALL])
def test_limit_beyond_32_bits_masks_nothing(mask, plain, implementation):
  query, key = single(14, (1, 5, 4), (1, 7, 4))
  got, want = (
    attend(query, key, key, mask=mask, implementation=implementation)
    for mask in (mask, plain)
  )
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.exhaustive
def test_infinite_value_stays_in_its_feature():
  query, key, value = single(14, (5, 2), (7, 2), (7, 2))
  value = value.at[-1, 0].set(jnp.inf)
  context = attend(query, key, value, implementation=SMALL)
  want = attend(query, key, value, implementation="reference")
  np.testing.assert_array_equal(context[:, 0], jnp.inf)
  np.testing.assert_allclose(context[:, 1], want[:, 1], rtol=1e-5)
