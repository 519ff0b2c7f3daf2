"""The cosine score for tokens of any size that float32 represents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import cosine_score
from tests.attention.oracle import draw


def cosines(query, key):
  query, key = (
    np.float64(each) / np.linalg.norm(np.float64(each), axis=-1, keepdims=True)
    for each in (query, key)
  )
  return query @ key.T


@pytest.mark.parametrize(
  "size", [1e-35, 1e-19, 1e-14, 1.0, 1e12, 1e20, 1e37, 1e38]
)
def test_scores_and_gradients_of_tokens_of_any_size(size):
  query, key, weight = draw(0, (3, 4), (5, 4), (3, 5))
  query, key, weight = map(np.float32, (query * np.float64(size), key, weight))

  @jax.jit
  def value_and_gradient(query):
    def loss(query):
      scores = cosine_score(query, jnp.asarray(key))
      return jnp.sum(weight * scores), scores

    return jax.grad(loss, has_aux=True)(query)

  gradient, scores = value_and_gradient(jnp.asarray(query))
  np.testing.assert_allclose(scores, cosines(query, key), rtol=0, atol=1e-6)
  # d cos(q, k) / dq = (k / |k| - cos(q, k) q / |q|) / |q|
  query, key = np.float64(query), np.float64(key)
  norm = np.linalg.norm(query, axis=-1, keepdims=True)
  along = np.sum(weight * cosines(query, key), -1, keepdims=True)
  of_key = weight @ (key / np.linalg.norm(key, axis=-1, keepdims=True))
  expected = of_key - along * query / norm
  # Tokens of 1e37 have gradients that float32 does not represent.
  atol = 1e-6 if size < 1e37 else 2.0
  np.testing.assert_allclose(
    np.float64(gradient) * norm, expected, rtol=1e-5, atol=atol
  )


@pytest.mark.parametrize("size", [0.0, 1e-39])
def test_second_derivatives_of_zeros_in_a_scan_are_zero(size):
  # There, JAX differentiates the rule of the first derivative.
  def total(query):
    def step(total, _):
      return total + cosine_score(query, jnp.eye(3)).sum(), None

    return jax.lax.scan(step, 0.0, length=2)[0]

  second = jax.jit(jax.jacfwd(jax.grad(total)))
  assert not second(jnp.full((1, 3), size)).any()


def test_a_token_of_zeros_has_score_and_gradient_zero():
  compute = jax.value_and_grad(
    lambda query: cosine_score(query, jnp.ones((2, 3))).sum()
  )
  value, gradient = jax.jit(compute)(np.zeros((1, 3), np.float32))
  assert value == 0.0
  assert not np.any(gradient)
