"""Masked keys and queries change nothing, even where they are not finite."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import biases, masks, scores
from attention.implementations import non_finite
from tests.attention.comparison import jitted
from tests.attention.oracle import (
  CASES,
  draw,
  draw_parameters,
  loop_attend,
  single,
)
from tests.matrix import (
  NAMED_IMPLEMENTATIONS,
  each_implementation,
  sampled,
  sampled_product,
  scores_and_implementations,
)

attend = jitted(attention.attend)
attention_weights = jitted(attention.attention_weights)
NON_FINITE = (np.nan, np.inf, -np.inf)
HIDDEN_KEYS = [1, 4]


def hiding(how, length=5):
  """Two ways to hide the same keys from every query."""
  seen = np.ones(length, bool)
  seen[HIDDEN_KEYS] = False
  if how == "mask":
    return {"mask": jnp.asarray(seen)[None]}
  return {"bias": jnp.where(seen, 0.0, -jnp.inf)[None]}


@sampled("how", ["mask", "bias"], default=["mask"])
@sampled_product(
  ("name", "choice", "return_lse"),
  (CASES, NAMED_IMPLEMENTATIONS, [True, False]),
  default=[
    ("general", "tiles", True),
    ("scaled_dot", "one_tile", True),
    ("cosine", "reference", False),
  ],
)
def test_masked_keys_change_nothing(name, choice, how, return_lse):
  query, key, value = single(0, (2, 3, 4), (2, 5, 4), (2, 5, 2))
  case = CASES[name]
  parameters = draw_parameters(case, 4, dtype=jnp.float32)
  arguments = hiding(how)
  index = np.asarray(HIDDEN_KEYS)

  def loss(query, key, value, parameters):
    results = attend(
      query,
      key,
      value,
      score=case.bound(parameters),
      implementation=NAMED_IMPLEMENTATIONS[choice],
      return_lse=return_lse,
      **arguments,
    )
    context, *lse = results if return_lse else [results]
    total = jnp.sum(jnp.sin(context)) + sum(map(jnp.sum, lse))
    return total, (context, lse)

  run = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))
  clean = run(query, key, value, parameters)
  for number in NON_FINITE:
    spoilt, spoilt_value = np.array(key), np.array(value)
    spoilt[:, index], spoilt_value[:, index, 0] = number, number
    dirty = run(query, spoilt, spoilt_value, parameters)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    (_, key_gradient, value_gradient, _), _ = dirty
    assert not np.asarray(key_gradient)[:, index].any()
    assert not np.asarray(value_gradient)[:, index].any()


@scores_and_implementations([("general", "tiles"), ("additive", "tiles")])
def test_non_finite_token_affects_only_rows_that_attend_to_it(
  name, implementation
):
  (tokens,) = single(1, (5, 4))
  case = CASES[name]
  parameters = draw_parameters(case, 4, dtype=jnp.float32)

  def run(tokens, parameters):
    return attend(
      tokens,
      tokens,
      tokens,
      score=case.bound(parameters),
      mask=masks.causal(),
      implementation=implementation,
      return_lse=True,
    )

  def loss(tokens, parameters):
    context, lse = run(tokens, parameters)
    return jnp.sum(context[:3] ** 2) + jnp.sum(lse[:3]), (context, lse)

  differentiated = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
  clean_gradients, clean = differentiated(tokens, parameters)
  for number in NON_FINITE:
    gradients, (context, lse) = differentiated(
      tokens.at[3, 0].set(number), parameters
    )
    assert jnp.isnan(context[3:]).all()
    assert jnp.isnan(lse[3:]).all()
    np.testing.assert_array_equal(context[:3], clean[0][:3])
    np.testing.assert_array_equal(lse[:3], clean[1][:3])
    jax.tree.map(np.testing.assert_array_equal, gradients, clean_gradients)


@each_implementation()
def test_rows_of_nan_have_no_derivatives(implementation):
  (tokens,) = single(9, (5, 4))

  def loss(query, key, value):
    context = attend(
      query, key, value, mask=masks.causal(), implementation=implementation
    )
    # The cotangent of a row of NaN is NaN, also that of zero times its sine.
    seen = np.array([1.0, 1.0, 1.0, 0.0, 0.0], np.float32)[:, None]
    return jnp.sum(seen * jnp.sin(context)), context

  gradients = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
  value = jax.jit(lambda *tokens: loss(*tokens)[1])
  clean_gradients, clean = gradients(*[tokens] * 3)
  for number in NON_FINITE:
    for place in range(3):
      given = [tokens] * 3
      given[place] = np.array(tokens)
      given[place][3:, 0] = number
      found, context = gradients(*given)
      # Programs without derivatives may compute the context in another way.
      for each in (context, value(*given)):
        assert np.isnan(each)[3:].all()
        np.testing.assert_allclose(each[:3], clean[:3], 1e-6)
      for got, want in zip(found, clean_gradients):
        np.testing.assert_allclose(got[:3], want[:3], 1e-5, 1e-6)
        assert not got[3:].any()


@each_implementation()
def test_tangents_of_hidden_nan_change_nothing(implementation):
  (tokens,) = single(9, (5, 4))

  @jax.jit
  def tangent(tokens):
    def context(tokens):
      return attend(
        *[tokens] * 3, mask=masks.causal(), implementation=implementation
      )

    return jax.jvp(context, (tokens,), (tokens,))[1]

  got = tangent(tokens.at[3].set(jnp.nan))
  np.testing.assert_allclose(got[:3], tangent(tokens)[:3], 1e-5, 1e-6)


@each_implementation()
def test_nan_value_affects_context_and_not_weights(implementation):
  query, key, value = draw(2, (3, 4), (5, 4), (5, 2))
  value[2] = np.nan
  mask = jnp.asarray([[True] * 5, [True, True, False, True, True], [False] * 5])
  context, lse = attend(
    query, key, value, mask=mask, implementation=implementation, return_lse=True
  )
  np.testing.assert_array_equal(
    jnp.isnan(context), [[True] * 2, [False] * 2, [False] * 2]
  )
  assert not jnp.isnan(lse).any()
  assert not jnp.isnan(attention_weights(query, key, mask=mask)).any()


@each_implementation(default=["reference", "tiles"])
def test_nan_value_outside_of_jit(implementation):
  """Where nothing is traced, rows are computed only if a token is NaN."""
  query, key, value = draw(2, (3, 4), (3, 4), (3, 2))
  contexts = []
  for number in (value[2, 0], np.nan):
    value[2, 0] = number
    context = attention.attend(
      query, key, value, mask=masks.causal(), implementation=implementation
    )
    contexts.append(np.asarray(context))
  np.testing.assert_allclose(contexts[1][:2], contexts[0][:2], rtol=1e-6)
  assert np.isfinite(contexts[0]).all()
  assert np.isnan(contexts[1][2]).all()


@each_implementation()
def test_unmasked_nan_key_makes_context_nan(implementation):
  query, key, value = draw(3, (3, 4), (5, 4), (5, 2))
  key[2, 1] = np.nan
  context = attend(query, key, value, implementation=implementation)
  assert jnp.isnan(context).all()


@each_implementation()
def test_nan_key_changes_nothing_for_a_score_that_does_not_read_keys(
  implementation,
):
  query, key, value, weight = draw(3, (5, 4), (5, 4), (5, 2), (6, 4))

  @jax.jit
  def contexts(key):
    score = scores.location(jnp.asarray(weight))
    options = {"score": score, "implementation": implementation}
    return [
      attend(query, key, value, mask=mask, **options)
      for mask in (None, masks.causal())
    ]

  spoilt = key.copy()
  spoilt[3] = np.nan
  for got, want in zip(contexts(spoilt), contexts(key)):
    np.testing.assert_array_equal(got, want)


def test_fully_masked_nan_query_has_zero_weights():
  query, key = draw(4, (2, 4), (5, 4))
  query[0] = np.nan
  mask = jnp.asarray([[False], [True]])
  weights = attention_weights(query, key, mask=mask)
  assert not weights[0].any()
  np.testing.assert_allclose(weights[1].sum(), 1.0, rtol=1e-6)


def test_padding_aligns_with_batch_and_arrays_with_trailing_axes():
  query, key = draw(5, (2, 2, 3, 4), (2, 2, 5, 4))
  lengths = jnp.array([1, 4])
  weights = attention_weights(query, key, mask=masks.padding(lengths))
  np.testing.assert_array_equal(
    (np.asarray(weights) > 0).sum(-1),
    np.broadcast_to(lengths[:, None, None], (2, 2, 3)),
  )
  # The same numbers in an array would broadcast along the heads.
  array = np.arange(5) < np.asarray(lengths)[:, None, None]
  by_head = attention_weights(query, key, mask=array)
  np.testing.assert_array_equal(
    (np.asarray(by_head) > 0).sum(-1),
    np.broadcast_to(lengths[None, :, None], (2, 2, 3)),
  )


@each_implementation(default=["reference", "tiles"])
def test_combined_masks_and_biases_equal_dense_arrays(implementation):
  query, key, value = draw(6, (2, 4, 5, 3), (2, 1, 7, 3), (2, 1, 7, 2))
  ids = jnp.array([[0, 0, 1, 1, 1, 2, 2]] * 2)
  mask = (masks.causal(2) | masks.prefix(jnp.array([1, 3]))) & ~masks.segments(
    ids[:, :5], ids
  )
  bias = biases.alibi(4) + jnp.asarray(draw(7, (5, 7))[0], jnp.float32)
  structured = attend(
    query, key, value, mask=mask, bias=bias, implementation=implementation
  )
  rows, columns = np.arange(5)[:, None], np.arange(7)
  allowed = np.stack(
    [(columns <= rows + 2) | (columns < limit) for limit in (1, 3)]
  )
  allowed &= ids[:, :5, None] != ids[:, None, :]
  slopes = np.array([0.25, 0.0625, 0.015625, 0.00390625])[:, None, None]
  numbers = -slopes * abs(rows - columns) + draw(7, (5, 7))[0]
  table = query @ key.swapaxes(-1, -2) / 3**0.5 + numbers
  dense, *_ = loop_attend(table, value, allowed[:, None])
  np.testing.assert_allclose(structured, dense, rtol=1e-5, atol=1e-6)


@each_implementation(default=["tiles"])
def test_large_masked_score_does_not_make_gradients_non_finite(implementation):
  query, key, value = single(8, (3, 4), (5, 4), (5, 2))
  mask = masks.sliding_window(0, 0)
  # A masked score is replaced before its exponential can overflow:
  # otherwise the gradient is zero times inf, NaN.
  key = key.at[4].set(1e4 * jnp.sign(query[0]))

  def loss(query, key, value):
    context = attend(
      query, key, value, mask=mask, implementation=implementation
    )
    return jnp.sum(jnp.sin(context))

  for leaf in jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value):
    assert jnp.isfinite(leaf).all()


@each_implementation(default=["tiles"])
def test_a_bias_hides_keys_whose_scores_overflow(implementation):
  query, key, value = single(8, (3, 4), (5, 4), (5, 2))
  query = jnp.full_like(query, 2.0)

  @jax.jit
  @functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
  def loss(query, key, value):
    bias = hiding("bias")["bias"]
    context = attend(
      query, key, value, bias=bias, implementation=implementation
    )
    return jnp.sum(jnp.sin(context))

  large = key.at[jnp.array(HIDDEN_KEYS)].set(3e38)
  for got, want in zip(
    *map(jax.tree.leaves, (loss(query, large, value), loss(query, key, value)))
  ):
    np.testing.assert_allclose(got, want, rtol=1e-6)


@each_implementation()
def test_hidden_nan_of_a_score_with_infinite_derivatives_at_zero(
  implementation,
):
  query, key, value = map(jnp.asarray, draw(10, (3, 4), (5, 4), (5, 2)))

  def score(query, key):
    norms = jnp.linalg.norm(key, axis=-1)
    return query @ jnp.swapaxes(key, -1, -2) - norms[..., None, :]

  @jax.jit
  @jax.grad
  def gradient(key):
    context = attend(
      query,
      key,
      value,
      score=score,
      mask=jnp.arange(5)[None] < 4,
      implementation=implementation,
    )
    return jnp.sum(context**2)

  got = gradient(key.at[4].set(jnp.nan))
  np.testing.assert_allclose(got[:4], gradient(key)[:4], 1e-5, 1e-7)
  assert not got[4].any()


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 1, 4, 5), (2, 1, 1, 5)])
def test_flags_of_rows_by_products_are_those_of_pairs(shape):
  generator = np.random.default_rng(0)
  visible = generator.random(shape) < 0.4
  keys, queries = (generator.random((2, 3, size)) < 0.3 for size in (5, 4))
  for flags in ([keys], [keys, queries]):
    by_product, by_pairs = (
      jitted(each)(visible, *flags)
      for each in (non_finite._any_flagged_by_product, non_finite._any_flagged)
    )
    np.testing.assert_array_equal(by_product, by_pairs)


@each_implementation()
def test_a_dot_product_of_the_user_may_hide_all_keys(implementation):
  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True, eq=False)
  class Above(scores.dot):
    def pair(self, query, key):
      products = super().pair(query, key)
      return jnp.where(products > 100.0, products, -jnp.inf)

  tokens = draw(11, (3, 4), (5, 4), (5, 2))
  context = attend(*tokens, score=Above(), implementation=implementation)
  np.testing.assert_array_equal(context, 0.0)


@each_implementation()
@sampled("number", [np.nan, -np.inf], default=[np.nan])
def test_a_bias_that_hides_nothing_keeps_the_nan_of_tokens(
  implementation, number
):
  tokens = jnp.asarray(draw(12, (2, 5, 4))[0])

  def context(bias):
    return attend(
      tokens.at[:, 3, 0].set(number),
      tokens,
      tokens.at[0, 2].set(number),
      bias=bias,
      mask=masks.causal(),
      implementation=implementation,
    )

  # An array may hide pairs.
  as_array = biases.alibi(2).materialize(5, 5)
  np.testing.assert_array_equal(
    jnp.isnan(context(biases.alibi(2))), jnp.isnan(context(as_array))
  )


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
def test_rows_of_infinite_values_have_no_derivatives_beside_a_sink(
  implementation,
):
  tokens = jnp.array([[1.0, 2.0], [3.0, 1.0]])
  value = jnp.array([[1.0], [jnp.inf]])
  mask = jnp.array([[True, False], [True, True]])

  def first_row(key, value):
    return attention.attend(
      *(tokens, key, value),
      mask=mask,
      normalizer=attention.normalizers.softmax(sink=0.0),
      implementation=implementation,
    )

  @jax.jit
  def run(key, value, cotangent):
    result, transpose = jax.vjp(lambda key: first_row(key, value), key)
    return result, transpose(cotangent)[0]

  result, got = map(np.asarray, run(tokens, value, jnp.ones((2, 1))))
  assert np.isfinite(result[0, 0])
  assert np.isnan(result[1, 0])
  # The cotangent of the first row only.
  _, clean = run(tokens, value.at[1].set(0.0), jnp.array([[1.0], [0.0]]))
  np.testing.assert_allclose(got, clean, rtol=1e-5)
