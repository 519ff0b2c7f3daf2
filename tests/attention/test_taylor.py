"""`jax.experimental.jet`, applied to attention."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet

from attention import (
  attend,
  attention_weights,
  dot_product_attention,
  masks,
  multi_head_attention,
  normalizers,
  scores,
)
from attention.implementations.blockwise import Blockwise
from tests.attention.comparison import close, wide
from tests.attention.oracle import draw
from tests.matrix import sampled

TILES = Blockwise(query_block=2, key_block=3)
COSINE = scores.cosine()
CAUSAL = np.tri(5, 7, dtype=bool)


def tokens():
  return draw(0, (5, 4), (7, 4), (7, 3))


def series_of(arrays, order):
  return [[*draw(3, *[np.shape(each)] * order)] for each in arrays]


def nested_derivatives(function, primals, series):
  """What `jet` returns, by nested `jax.jvp` along the polynomial."""

  def along(time):
    return function(
      *(
        primal
        + sum(
          term * time**n / math.factorial(n) for n, term in enumerate(terms, 1)
        )
        for primal, terms in zip(primals, series)
      )
    )

  derivatives = [along]
  for _ in series[0]:
    derivatives.append(
      lambda time, last=derivatives[-1]: jax.jvp(last, (time,), (1.0,))[1]
    )
  value, *terms = (each(0.0) for each in derivatives)
  return value, terms


expected = jax.jit(nested_derivatives, static_argnums=0)


def check(function, primals, order, dense=None):
  """Compares `jet` of the function with derivatives of a dense formula."""
  with wide():
    series = series_of(primals, order)
    got = jax.jit(functools.partial(jet, function))(primals, series)
    close(got, expected(dense or function, primals, series))


def average(table, value, visible):
  table = jnp.where(visible, table, -jnp.inf)
  return jax.nn.softmax(table, axis=-1) @ value


def dense_dot(query, key, value):
  return average(query @ key.T / 2.0, value, CAUSAL[: len(query), : len(key)])


def dense_additive(query, key, value, *weights):
  query_weight, key_weight, score_weight = weights
  hidden = (query @ query_weight)[:, None] + (key @ key_weight)[None]
  visible = np.arange(7)[None] < 5
  return average(jnp.tanh(hidden) @ score_weight, value, visible)


def additive(query, key, value, *weights, implementation):
  return attend(
    query,
    key,
    value,
    score=scores.additive(*weights),
    mask=masks.padding(5),
    implementation=implementation,
  )


@pytest.mark.parametrize("implementation", ["reference", TILES])
@sampled("order", [1, 2, 3, 4], default=[3])
def test_scaled_dot(implementation, order):
  causal = functools.partial(
    attend, mask=masks.causal(), implementation=implementation
  )
  check(causal, tokens(), order, dense_dot)


@pytest.mark.parametrize("implementation", ["reference", TILES])
def test_additive_with_weights(implementation):
  arrays = [*tokens(), *draw(1, (4, 6), (4, 6), (6,))]
  function = functools.partial(additive, implementation=implementation)
  check(function, arrays, 2, dense_additive)


def test_long_sequences():
  query, key, value = draw(0, (600, 4), (600, 4), (600, 2))
  visible = np.tri(600, dtype=bool)
  check(
    functools.partial(attend, mask=masks.causal(), implementation="blockwise"),
    [query, key, value],
    2,
    lambda query, key, value: average(query @ key.T / 2.0, value, visible),
  )


def dense_with_lse(query, bias):
  _, key, value = tokens()
  table = query @ key.T / 2.0 + bias
  lse = jax.nn.logsumexp(table, axis=-1, keepdims=True)
  return jnp.concatenate([jnp.exp(table - lse) @ value, lse], axis=-1)


@pytest.mark.parametrize("implementation", ["reference", TILES])
def test_bias_and_lse(implementation):
  query, key, value = tokens()

  def both(query, bias):
    outputs = attend(
      query,
      key,
      value,
      bias=bias,
      implementation=implementation,
      return_lse=True,
    )
    return jnp.concatenate([outputs[0], outputs[1][:, None]], axis=-1)

  check(both, [query, *draw(1, (5, 7))], 2, dense_with_lse)


def test_weights():
  check(
    functools.partial(attention_weights, mask=masks.causal()),
    tokens()[:2],
    2,
    lambda query, key: dense_dot(query, key, np.eye(7)),
  )


def dense_with_factors(query, factors):
  _, key, value = tokens()
  return jax.nn.softmax((query * factors) @ key.T, axis=-1) @ value


@pytest.mark.parametrize("implementation", ["reference", TILES])
def test_a_function_that_captures_an_array(implementation):
  query, key, value = tokens()

  def context(query, factors):
    return attend(
      query,
      key,
      value,
      score=lambda query, key: (query * factors) @ key.T,
      implementation=implementation,
    )

  check(context, [query, *draw(1, (1, 4))], 2, dense_with_factors)


def dropping(query, key, value, implementation="reference"):
  return attend(
    query,
    key,
    value,
    normalizer=normalizers.softpick(),
    mask=masks.causal(),
    dropout_rate=0.3,
    rng=jax.random.key(0),
    implementation=implementation,
  )


@pytest.mark.parametrize("implementation", ["reference", TILES])
def test_other_normalizers_and_dropout(implementation):
  function = functools.partial(dropping, implementation=implementation)
  check(function, tokens(), 2, dropping)


@sampled("score", [scores.scaled_dot(), COSINE], default=[COSINE])
def test_multi_head_attention(score):
  function = functools.partial(
    multi_head_attention, score=score, rotary=True, mask=masks.causal()
  )
  shapes = (4, 2, 2), (4, 2, 2), (3, 2, 3), (2, 3, 4)
  check(function, [*tokens(), *draw(1, *shapes)], 2)


def test_dot_product_attention():
  arrays = draw(1, (1, 5, 4, 4), (1, 7, 2, 4), (1, 7, 2, 4))
  check(functools.partial(dot_product_attention, is_causal=True), arrays, 2)


def test_attention_without_derivatives():
  query, key, value = tokens()

  def scaled(factor):
    # jet wraps the sum, whose coefficients are zero.
    return factor * attend(query + 1.0, key, value, mask=masks.causal())

  check(scaled, [np.float64(2.0)], 2)


def second_coefficient(transformed, query):
  _, key, value = tokens()
  context = functools.partial(attend, mask=masks.causal())
  return transformed(
    lambda query: context(query, key, value),
    (query,),
    ([*draw(1, (5, 4), (5, 4))],),
  )[1][1]


def test_outside_of_jit():
  query = tokens()[0]
  with wide():
    got = second_coefficient(jet, query)
    want = functools.partial(second_coefficient, nested_derivatives)
    close(got, jax.jit(want)(query))


def test_gradient_and_vmap_of_jet():
  query = tokens()[0]

  def transformed(make):
    function = functools.partial(second_coefficient, make)
    gradient = jax.grad(lambda query: jnp.sum(function(query)))
    return jax.jit(lambda: (gradient(query), jax.vmap(function)(query[None])))()

  with wide():
    close(transformed(jet), transformed(nested_derivatives))
