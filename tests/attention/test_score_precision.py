"""Rounding of scores: products in float32, half precision rounded once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import scores
from tests.attention.comparison import jitted, products
from tests.attention.oracle import draw


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
  # Otherwise it has sums only.
  assert bool(found) == (length == 1)
  highest = jax.lax.Precision.HIGHEST
  assert set(found) <= {(highest, highest)}


def test_positions_that_local_p_predicts_for_bfloat16_are_float32():
  arrays = draw(4, (50, 24), (24, 8), (8,))
  query, weight, vector = (jnp.asarray(x, jnp.bfloat16) for x in arrays)
  score = scores.local(scores.dot(), 2.0, weight, vector)
  parts = jax.jit(score.map_query)(query)[..., 24:]
  assert parts.dtype == jnp.bfloat16
  found = np.sum(np.asarray(parts, np.float64), axis=-1)
  wide = [np.asarray(each, np.float64) for each in (query, weight, vector)]
  logits = np.tanh(wide[0] @ wide[1]) @ wide[2]
  np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_local_p_has_the_scores_of_contents_in_every_dtype(dtype):
  arrays = draw(5, (20, 24), (30, 24), (24, 8), (8,))
  query, key, weight, vector = (jnp.asarray(x, dtype) for x in arrays)
  score = scores.local(scores.scaled_dot(), 5.0, weight, vector)
  run = jax.jit(lambda query, key: score(query, key))
  wide = [np.float32(each) for each in (query, key)]
  np.testing.assert_allclose(run(query, key), run(*wide), atol=1e-4)


@pytest.mark.parametrize("scale", [None, 0.3, jnp.array([0.3, 0.4])])
def test_scaled_dot_of_bfloat16_rounds_its_tokens_only(scale):
  query, key = draw(3, (2, 5, 24), (2, 6, 24), dtype=jnp.bfloat16)
  found = jitted(scores.scaled_dot(scale))(query, key)
  factor = 24**-0.5 if scale is None else np.reshape(scale, (-1, 1, 1))
  products = np.float64(query) @ np.swapaxes(np.float64(key), -1, -2)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, factor * products, rtol=1e-5, atol=1e-6)
