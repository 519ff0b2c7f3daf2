"""Sums of the additive score's derivatives are float32 on every platform."""

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from attention import scores


def products(jaxpr):
  for equation in jaxpr.eqns:
    if equation.primitive.name == "dot_general":
      yield equation
    for inner in jaxprs_in_params(equation.params):
      yield from products(inner)


@pytest.mark.parametrize("length", [1, 8, 80], ids=["pairs", "once", "loop"])
def test_products_of_the_additive_derivative_have_the_highest_precision(length):
  size = 64
  query, key = jnp.ones((length, size)), jnp.ones((80, size))
  score = scores.additive(jnp.eye(size), jnp.eye(size), jnp.ones(size))

  def loss(score_weight, query, key):
    score = scores.additive(jnp.eye(size), jnp.eye(size), score_weight)
    return score.pair(query, key).sum()

  mapped = score.map_query(query), score.map_key(key)
  gradient = jax.grad(loss, (0, 1, 2))
  closed = jax.make_jaxpr(gradient)(score.score_weight, *mapped)
  found = list(products(closed.jaxpr))
  assert found
  highest = jax.lax.Precision.HIGHEST
  for product in found:
    assert product.params["precision"] == (highest, highest), product
