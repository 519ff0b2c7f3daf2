"""NaN in the dense formula with a mask."""

import functools
import itertools

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


def of_names(arrays, place=None, first=slice(FIRST_BAD, None)):
  """Tokens by name, with NaN in those of one of the names."""
  named = dict(zip(("query", "key", "value"), map(np.array, arrays)))
  if place:
    named[place][:, first, 1] = np.nan
  return named


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
  arrays = [*map(np.array, arrays)]
  arrays[place][:, FIRST_BAD, 1] = number
  return arrays


@sampled_product(
  ("name", "features"),
  [SCORES, [4, 3]],
  default=[("general", 4), ("cosine", 3)],
)
def test_rows_that_attend_to_non_finite_tokens_are_nan(name, features):
  arrays = tokens(features=features)
  first = jax.jit(
    jax.grad(functools.partial(loss, name), (0, 1, 2, 3), has_aux=True)
  )
  second = jax.jit(functools.partial(second_derivatives, name))
  clean, of_clean = first(*arrays), second(*arrays)
  numbers = np.nan, np.inf, -np.inf
  for place, number in itertools.product(range(3), numbers):
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


@sampled("name", SCORES, default=["general"])
def test_tangents_of_nan_change_no_other_rows(name):
  arrays = tokens()

  @jax.jit
  def tangent(*arrays):
    function = functools.partial(context, name)
    return jax.jvp(function, arrays, arrays)[1][:, :FIRST_BAD]

  for place in range(3):
    got = tangent(*spoilt(arrays, place, np.nan))
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
  function = jax.value_and_grad(
    lambda *tokens: jnp.sum(attend(*tokens, mask=masks.padding(0))), (0, 1, 2)
  )
  found, gradients = jax.jit(function)(
    query.at[0, 1].set(jnp.nan), key, value.at[0, 1].set(jnp.nan)
  )
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

  @functools.partial(jax.jit, static_argnums=1)
  def tangent(tokens, implementation):
    def context(tokens):
      return attention.attend(
        *[tokens] * 3,
        score=distance,
        mask=~jnp.eye(5, dtype=bool),
        implementation=implementation,
      )

    return jax.jvp(context, (tokens,), (jnp.ones_like(tokens),))[1]

  got, want = (tangent(tokens, each) for each in ("reference", "blockwise"))
  assert jnp.isfinite(want).all()
  np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def test_large_hidden_tokens_change_no_derivatives():
  """Whose products with tangents or cotangents exceed the largest number."""
  query, key, value, _ = (each[0] for each in tokens())

  @jax.jit
  def derivatives(query, key, value):
    def loss(query):
      result = attend(query, key, value, mask=masks.causal())
      return 4.0 * result[:FIRST_BAD]

    return jax.jacfwd(loss)(query), jax.jacrev(loss)(query)

  def large(tokens, number):
    return tokens.at[FIRST_BAD:].set(number)

  for change in (
    lambda number: (query, large(key, number), value),
    lambda number: (query, key, large(value, number)),
  ):
    got, want = (derivatives(*change(number)) for number in (3e38, 0.0))
    close(got, want, 1e-5, 1e-6)


class Tripled(scores.qk_norm):
  """A wrapper that changes scores beside tokens."""

  def pair_at(self, query, key, positions):
    return 3.0 * super().pair_at(query, key, positions)


def test_a_class_that_inherits_from_a_wrapper_computes_its_scores():
  query, key, value, _ = tokens()
  inner = scores.qk_norm(scores.dot())
  options = {"mask": masks.causal()}
  tripled = scores.modified(inner, lambda scores, *_: 3.0 * scores)
  got, want = jax.jit(
    lambda *tokens: [
      attend(*tokens, score=score, **options)
      for score in (Tripled(scores.dot()), tripled)
    ]
  )(query, key, value)
  np.testing.assert_allclose(got, want, 1e-6)


def test_hidden_infinite_biases_have_finite_gradients():
  query, key, value, _ = tokens()
  bias = jnp.zeros((5, 5)).at[:, 1].set(-jnp.inf)

  def loss(bias, implementation):
    result = attention.attend(
      query, key, value, bias=bias, implementation=implementation
    )
    return jnp.sum(jnp.sin(result))

  got, want = jax.jit(
    lambda bias: [
      jax.grad(loss)(bias, name) for name in ("reference", "blockwise")
    ]
  )(bias)
  assert jnp.isfinite(want).all()
  np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def test_minus_infinity_of_a_score_hides_no_nan():
  """As in tiles, and in calls with an lse: only masks and biases hide NaN."""

  def of_marked_keys(query, key):
    return jnp.where(key[..., None, :, 0] > 0.0, query @ key.mT, -jnp.inf)

  options = {"score": of_marked_keys, "mask": masks.causal()}

  @jax.jit
  def contexts(given):
    return [
      attend(**given, **options),
      attend(**given, **options, return_lse=True)[0],
      attention.attend(**given, **options, implementation="blockwise"),
    ]

  query, key, value, _ = tokens()
  key = key.at[..., 0].set(np.where(np.arange(5) < FIRST_BAD, 1.0, -1.0))
  for place in ("key", "value"):
    given = of_names((query, key, value), place, first=FIRST_BAD)
    found, *others = contexts(given)
    np.testing.assert_array_equal(
      np.isnan(found[0, :, 0]), np.arange(5) >= FIRST_BAD
    )
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


def test_nan_of_values_does_not_spread_to_the_lse():
  """Values and derivatives, with respect to all tokens, of first order."""
  options = {"mask": masks.causal(), "return_lse": True}
  clean = of_names(tokens())
  assert masked.serves(make_request(**clean, score=scores.dot(), **options))

  def loss(arrays, implementation):
    context, lse = attention.attend(
      **arrays, implementation=implementation, **options
    )
    seen = (jnp.sum(jnp.sin(each[:, :FIRST_BAD])) for each in (context, lse))
    return sum(seen), (context, lse)

  gradient = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
  for place in clean:
    arrays = of_names(clean.values(), place)
    gradients, (context, lse) = gradient(arrays, "reference")
    np.testing.assert_array_equal(
      np.isnan(context[0, :, 0]), np.arange(5) >= FIRST_BAD
    )
    assert jnp.isnan(lse[0, FIRST_BAD:]).all() == (place != "value")
    if place == "value":
      lse_of_clean = gradient(clean, "reference")[1][1]
      np.testing.assert_array_equal(lse, lse_of_clean)
    of_tiles, want = gradient(arrays, "blockwise")
    close((context, lse), tuple(want), rtol=1e-5, atol=1e-6)
    close(gradients, of_tiles, rtol=1e-5, atol=1e-6)


def test_derivatives_of_any_mode_ignore_rows_of_nan():
  """Also where tangents of products are NaN: weights are zero there."""
  arrays = of_names(tokens())

  def loss(arrays):
    context, lse = attention.attend(
      **arrays, mask=masks.causal(), return_lse=True, implementation="reference"
    )
    seen = (jnp.sum(jnp.sin(each[:, :FIRST_BAD])) for each in (context, lse))
    return sum(seen)

  @jax.jit
  def derivatives(arrays):
    moved = jax.tree.map(jnp.ones_like, arrays)
    first = jax.jvp(loss, (arrays,), (moved,))[1]
    second = jax.grad(lambda arrays: jax.jvp(loss, (arrays,), (moved,))[1])
    product = jax.jvp(jax.grad(loss), (arrays,), (moved,))[1]
    return first, second(arrays), product

  want = derivatives(arrays)
  for place in arrays:
    dirty = of_names(arrays.values(), place)
    close(derivatives(dirty), want, rtol=1e-5, atol=1e-6)
