"""NaN in the dense formula with a mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import biases, masks, scores
from attention.implementations.reference import average, flagged_scores, masked
from attention.request import make_request
from tests.attention.comparison import close
from tests.attention.oracle import draw
from tests.matrix import sampled, sampled_product

# Scores of features of 4, with an array of numbers.
SCORES = {
  "scaled dot": lambda _: scores.scaled_dot(),
  "learned scale": lambda numbers: scores.scaled_dot(numbers[0, 0]),
  "general": scores.general,
  "cosine": lambda numbers: scores.cosine(numbers[0, 0]),
  "qk norm": lambda numbers: scores.qk_norm(scores.dot(), numbers[0], None),
}
attend = functools.partial(attention.attend, implementation="reference")
FIRST_BAD = 3  # with a causal mask, earlier rows do not attend to it


def tokens(dtype=jnp.float32, features=4):
  query, key, value, numbers = draw(
    0, *[(2, 5, 4)] * 2, (2, 5, features), (4, 4), dtype=dtype
  )
  return query, key, value, numbers


def context(name, query, key, value, numbers):
  bias = biases.alibi(2)
  return attend(
    query,
    key,
    value,
    score=SCORES[name](numbers),
    mask=masks.causal(),
    bias=bias,
  )


def loss(name, *arrays):
  result = context(name, *arrays)
  return jnp.sum(jnp.sin(result[:, :FIRST_BAD].astype(jnp.float32))), result


def second_derivatives(name, *arrays):
  """The gradients of a squared norm of gradients."""

  def norm(*arrays):
    gradients, _ = jax.grad(loss, (1, 2, 3, 4), has_aux=True)(name, *arrays)
    return sum(jnp.sum(each**2) for each in gradients)

  return jax.grad(norm, (0, 1, 2, 3))(*arrays)


def spoilt(arrays, place, number):
  """The arrays with a number in the token `FIRST_BAD` of one of them."""
  arrays = [*arrays]
  arrays[place] = arrays[place].at[:, FIRST_BAD, 1].set(number)
  return arrays


@pytest.mark.parametrize("place", range(3))
@sampled_product(
  ("name", "features"),
  [SCORES, [4, 3]],
  default=[("general", 4), ("cosine", 3)],
)
def test_rows_that_attend_to_non_finite_tokens_are_nan(name, features, place):
  arrays = tokens(features=features)
  first = jax.jit(
    jax.grad(functools.partial(loss, name), (0, 1, 2, 3), has_aux=True)
  )
  second = jax.jit(functools.partial(second_derivatives, name))
  clean, of_clean = first(*arrays), second(*arrays)
  for number in (np.nan, np.inf, -np.inf):
    given = spoilt(arrays, place, number)
    gradients, found = first(*given)
    is_nan = np.arange(5) == FIRST_BAD if place == 0 else np.arange(5) >= 3
    np.testing.assert_array_equal(
      jnp.isnan(found), np.broadcast_to(is_nan[:, None], found.shape)
    )
    np.testing.assert_array_equal(found[:, :3], clean[1][:, :3])
    for got, want in zip(gradients, clean[0]):
      np.testing.assert_array_equal(got, want)
    for got, want in zip(second(*given), of_clean):
      np.testing.assert_allclose(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize("place", range(3))
@sampled("name", SCORES, default=["general"])
def test_tangents_of_nan_change_no_other_rows(name, place):
  arrays = tokens()

  @jax.jit
  def tangent(*arrays):
    function = functools.partial(context, name)
    return jax.jvp(function, arrays, arrays)[1][:, :FIRST_BAD]

  got = tangent(*spoilt(arrays, place, jnp.nan))
  np.testing.assert_allclose(got, tangent(*arrays), 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@sampled("name", SCORES, default=["scaled dot", "learned scale"])
def test_context_and_gradients_are_those_of_the_softmax(name, dtype):
  arrays = tokens(dtype)

  def softmax(query, key, value, numbers):
    products = SCORES[name](numbers)(query, key).astype(jnp.float32)
    query, key = np.arange(5)[:, None], np.arange(5)
    slopes = np.array([0.0625, 0.00390625])[:, None, None]
    products -= slopes * abs(query - key)
    products = jnp.where(key <= query, products, -jnp.inf)
    return jax.nn.softmax(products) @ value.astype(jnp.float32)

  def gradients(function):
    def total(*arrays):
      return jnp.sum(jnp.sin(function(*arrays).astype(jnp.float32)))

    return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*arrays)

  got, want = map(gradients, (functools.partial(context, name), softmax))
  tolerance = 2e-2 if dtype == jnp.bfloat16 else 2e-6
  jax.tree.map(
    lambda got, want: np.testing.assert_allclose(
      got.astype(jnp.float32), want.astype(jnp.float32), tolerance, tolerance
    ),
    got,
    want,
  )


def test_rows_without_keys_are_zero_beside_nan():
  query, key, value, _ = tokens()
  found, gradients = jax.value_and_grad(
    lambda *tokens: jnp.sum(attend(*tokens, mask=masks.padding(0))), (0, 1, 2)
  )(query.at[0, 1].set(jnp.nan), key, value.at[0, 1].set(jnp.nan))
  assert found == 0.0
  assert not any(each.any() for each in gradients)


def test_calls_without_keys_and_without_features():
  query, key, value, _ = tokens()
  assert not attend(query, key[:, :0], value[:, :0], mask=masks.causal()).any()
  value = value.at[:, FIRST_BAD].set(jnp.nan)
  found = attend(query[..., :0], key[..., :0], value, mask=masks.causal())
  np.testing.assert_array_equal(
    jnp.isnan(found[0, :, 0]), np.arange(5) >= FIRST_BAD
  )


def test_a_row_whose_products_are_minus_infinity_is_nan():
  query, key, value = (jnp.ones((3, 4)) for _ in range(3))
  query = query.at[2, 1].set(-jnp.inf)
  found = attend(query, key, value, mask=masks.causal())
  np.testing.assert_array_equal(jnp.isnan(found[:, 0]), [False, False, True])


@pytest.mark.parametrize("keys", [1, 2])
def test_a_row_without_keys_is_zero_however_many_keys_others_have(keys):
  query, key, value = jnp.ones((2, 3, 4)), *[jnp.ones((2, keys, 4))] * 2
  call = functools.partial(attend, mask=masks.padding(jnp.array([0, keys])))
  for function in (call, jax.jit(call)):
    found = function(query, key, value)
    np.testing.assert_allclose(found[:, 0, 0], [0.0, 1.0], 1e-6)


def test_one_key_has_no_reduction_that_starts_from_a_number_on_tpus():
  """XLA ignores its start; for more keys it is faster on TPUs."""

  def lowered(keys, platform):
    call = functools.partial(attend, mask=masks.padding(jnp.array([0, 1])))
    tokens = jnp.ones((2, 3, 4)), *[jnp.ones((2, keys, 4))] * 2
    return jax.jit(call).trace(*tokens).lower(lowering_platforms=(platform,))

  one, two = (
    [lowered(keys, platform).as_text() for platform in ("cpu", "tpu")]
    for keys in (1, 2)
  )
  assert one[0].count("stablehlo.maximum") == one[1].count("stablehlo.maximum")
  assert two[0].count("stablehlo.maximum") > two[1].count("stablehlo.maximum")


def distance(query, key):
  """A score of infinite derivatives where tokens are equal."""
  gap = query[..., :, None, :] - key[..., None, :, :]
  return -jnp.sqrt(jnp.sum(gap * gap, axis=-1))


def test_infinite_tangents_of_hidden_pairs_change_nothing():
  tokens = jnp.arange(5.0)[:, None] ** 2

  def tangent(implementation):
    def context(tokens):
      return attention.attend(
        *[tokens] * 3,
        score=distance,
        mask=~jnp.eye(5, dtype=bool),
        implementation=implementation,
      )

    return jax.jvp(context, (tokens,), (jnp.ones_like(tokens),))[1]

  got, want = tangent("reference"), tangent("blockwise")
  assert jnp.isfinite(want).all()
  np.testing.assert_allclose(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize("place", ["key", "value"])
@pytest.mark.parametrize("mode", [jax.jacfwd, jax.jacrev])
def test_large_hidden_tokens_change_no_derivatives(mode, place):
  """Whose products with tangents or cotangents exceed the largest number."""
  query, key, value, _ = (each[0] for each in tokens())

  def derivatives(number):
    large = {"key": key, "value": value}
    large[place] = large[place].at[FIRST_BAD:].set(number)

    def loss(query):
      result = attend(query, *large.values(), mask=masks.causal())
      return 4.0 * result[:FIRST_BAD]

    return mode(loss)(query)

  np.testing.assert_allclose(derivatives(3e38), derivatives(0.0), 1e-5, 1e-6)


class Tripled(scores.qk_norm):
  """A wrapper that changes scores beside tokens."""

  def pair_at(self, query, key, positions):
    return 3.0 * super().pair_at(query, key, positions)


def test_a_class_that_inherits_from_a_wrapper_computes_its_scores():
  query, key, value, _ = tokens()
  inner = scores.qk_norm(scores.dot())
  options = {"mask": masks.causal()}
  got = attend(query, key, value, score=Tripled(scores.dot()), **options)
  tripled = scores.modified(inner, lambda scores, *_: 3.0 * scores)
  want = attend(query, key, value, score=tripled, **options)
  np.testing.assert_allclose(got, want, 1e-6)


def test_hidden_infinite_biases_have_finite_gradients():
  query, key, value, _ = tokens()
  bias = jnp.zeros((5, 5)).at[:, 1].set(-jnp.inf)

  def loss(bias, implementation):
    result = attention.attend(
      query, key, value, bias=bias, implementation=implementation
    )
    return jnp.sum(jnp.sin(result))

  got, want = (
    jax.grad(loss)(bias, name) for name in ("reference", "blockwise")
  )
  assert jnp.isfinite(want).all()
  np.testing.assert_allclose(got, want, 1e-5, 1e-6)


@pytest.mark.parametrize("place", ["key", "value"])
def test_minus_infinity_of_a_score_hides_no_nan(place):
  """As in tiles, and in calls with an lse: only masks and biases hide NaN."""
  query, key, value, _ = tokens()

  def of_marked_keys(query, key):
    return jnp.where(key[..., None, :, 0] > 0.0, query @ key.mT, -jnp.inf)

  key = key.at[..., 0].set(jnp.where(jnp.arange(5) < FIRST_BAD, 1.0, -1.0))
  given = {"key": key, "value": value}
  given[place] = given[place].at[:, FIRST_BAD, 1].set(jnp.nan)
  options = {"score": of_marked_keys, "mask": masks.causal()}
  found = attend(query, **given, **options)
  np.testing.assert_array_equal(
    jnp.isnan(found[0, :, 0]), np.arange(5) >= FIRST_BAD
  )
  others = [
    attend(query, **given, **options, return_lse=True)[0],
    attention.attend(query, **given, **options, implementation="blockwise"),
  ]
  for each in others:
    np.testing.assert_allclose(each, found, 1e-5, 1e-6)


def test_a_row_of_the_lowest_biases_is_the_mean_of_values():
  # Other programs write masks as biases of the lowest number.
  query, key, value, _ = tokens()
  bias = jnp.zeros((5, 5)).at[2].set(jnp.finfo(jnp.float32).min)
  found = attend(query, key, value, bias=bias, mask=masks.causal())
  np.testing.assert_allclose(found[:, 2], value[:, :3].mean(1), 1e-6)


@pytest.mark.parametrize("keys", [5, 8])  # 8 divides, or does not
def test_rows_of_nan_have_weights_of_zero(keys):
  scores = jnp.zeros((3, keys)).at[0, 1].set(jnp.nan).at[1, 2].set(jnp.inf)
  weights = jax.jit(average._finite_weights)(scores, jnp.ones((1, 1), bool))
  want = np.zeros((3, keys))
  want[2] = 1 / keys
  np.testing.assert_allclose(weights, want, 1e-6)


def test_products_of_gpus_have_the_same_flags():
  query, key, *_ = tokens()
  for number in (jnp.nan, jnp.inf, -jnp.inf):
    dirty = key.at[:, FIRST_BAD, 1].set(number), query.at[0, 2].set(number)
    for query_, key_ in ((query, dirty[0]), (dirty[1], key)):
      got = flagged_scores._flagged_products(query_, key_)
      want = flagged_scores._products_of_flagged(query_, key_)
      np.testing.assert_array_equal(got, want)
      assert 0 < jnp.isnan(got).sum() < got.size


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_nan_of_values_does_not_spread_to_the_lse(place):
  """Values and derivatives, with respect to all tokens, of first order."""
  arrays = dict(zip(("query", "key", "value"), tokens()[:3]))
  options = {"mask": masks.causal(), "return_lse": True}
  assert masked.serves(make_request(**arrays, score=scores.dot(), **options))

  def results(implementation, arrays):
    return attention.attend(**arrays, implementation=implementation, **options)

  def loss(arrays, implementation):
    context, lse = results(implementation, arrays)
    rows = slice(None, FIRST_BAD)
    return jnp.sum(jnp.sin(context[:, rows])) + jnp.sum(jnp.sin(lse[:, rows]))

  clean = arrays
  arrays = arrays | {place: arrays[place].at[:, FIRST_BAD:, 1].set(jnp.nan)}
  context, lse = results("reference", arrays)
  np.testing.assert_array_equal(
    jnp.isnan(context[0, :, 0]), np.arange(5) >= FIRST_BAD
  )
  assert jnp.isnan(lse[0, FIRST_BAD:]).all() == (place != "value")
  if place == "value":
    np.testing.assert_array_equal(lse, results("reference", clean)[1])
  want = results("blockwise", arrays)
  close((context, lse), tuple(want), rtol=1e-5, atol=1e-6)
  gradients, of_tiles = (
    jax.grad(loss)(arrays, name) for name in ("reference", "blockwise")
  )
  close(gradients, of_tiles, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", ["query", "key", "value"])
def test_derivatives_of_any_mode_ignore_rows_of_nan(place):
  """Also where tangents of products are NaN: weights are zero there."""
  arrays = dict(zip(("query", "key", "value"), tokens()[:3]))
  dirty = arrays | {place: arrays[place].at[:, FIRST_BAD:, 1].set(jnp.nan)}

  def loss(arrays, number):
    context, lse = attention.attend(
      **arrays, mask=masks.causal(), return_lse=True, implementation="reference"
    )
    rows = slice(None, number)
    return jnp.sum(jnp.sin(context[:, rows])) + jnp.sum(jnp.sin(lse[:, rows]))

  def derivatives(arrays):
    moved = jax.tree.map(jnp.ones_like, arrays)
    rows = functools.partial(loss, number=FIRST_BAD)
    first = jax.jvp(rows, (arrays,), (moved,))[1]
    second = jax.grad(lambda arrays: jax.jvp(rows, (arrays,), (moved,))[1])
    product = jax.jvp(jax.grad(rows), (arrays,), (moved,))[1]
    return first, second(arrays), product

  close(derivatives(dirty), derivatives(arrays), rtol=1e-5, atol=1e-6)
