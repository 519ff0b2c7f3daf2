import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.implementations.pallas.hopper.traced import row_functions
from attention.implementations.pallas.operands import Unsupported
from tests.attention.oracle import draw

TILE = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
WIDE = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def normalised(tokens, number):
  wide = tokens.astype(jnp.float32)
  square = jnp.sum(wide * wide, axis=-1, keepdims=True)
  size = jnp.max(jnp.abs(wide), axis=-1)[:, None]
  is_small = jnp.where(size < 2.5, 0.5, 1.0)
  return (number * wide * jax.lax.rsqrt(square) * is_small).astype(tokens.dtype)


def test_a_function_of_rows_is_transposed_tile_by_tile():
  tokens, cotangents = map(jnp.asarray, draw(0, (64, 64), (64, 64)))
  number = jnp.float32(1.5)

  def pull_back(tokens, cotangents, number):
    return jax.vjp(normalised, tokens, number)[1](cotangents)

  function = row_functions.traced(pull_back, [TILE, TILE, NUMBER])
  of_tokens, parts = function(tokens, cotangents, number)
  expected = pull_back(tokens, cotangents, number)
  np.testing.assert_allclose(of_tokens, expected[0], atol=1e-5)
  assert parts.shape == (64,)
  np.testing.assert_allclose(jnp.sum(parts), expected[1], rtol=1e-5)


def test_a_product_with_a_matrix_is_transposed():
  tokens, weight, cotangents = map(
    jnp.asarray, draw(0, (64, 64), (64, 128), (64, 128))
  )

  def pull_back(tokens, cotangents, weight):
    return jax.vjp(lambda *x: jnp.tanh(x[0]) @ x[1], tokens, weight)[1](
      cotangents
    )

  arguments = TILE, WIDE, jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
  function = row_functions.traced(pull_back, arguments, num_matrices=1)
  matrix = row_functions.Matrix(weight)
  of_tokens, of_weight = function(tokens, cotangents, matrix)
  expected = pull_back(tokens, cotangents, weight)
  np.testing.assert_allclose(of_tokens, expected[0], atol=1e-4)
  got = of_weight.left.T @ of_weight.right
  np.testing.assert_allclose(got, expected[1], atol=1e-4)


@pytest.mark.parametrize(
  "function",
  [
    lambda tokens, weight: tokens @ (2.0 * weight),
    lambda tokens, weight: weight @ tokens,
    lambda tokens, weight: tokens @ weight + weight[:1],
    lambda tokens, weight: jnp.matmul(tokens, weight, precision="highest"),
  ],
  ids=["scaled", "matrix first", "row", "precise"],
)
def test_other_functions_of_matrices_are_refused(function):
  with pytest.raises(Unsupported):
    row_functions.traced(lambda *x: [function(*x)], [TILE, TILE], 1)


@pytest.mark.parametrize(
  "function",
  [
    lambda tokens: tokens - jnp.mean(tokens, axis=0, keepdims=True),
    lambda tokens: tokens * jnp.arange(64)[None],
    lambda tokens: tokens.T,
    lambda tokens: tokens / jnp.sum(jnp.square(tokens)),
    lambda tokens: jnp.cumsum(tokens, axis=-1),
    lambda tokens: tokens + np.ones((1, 64)),
    lambda tokens: jnp.broadcast_to(jnp.sum(tokens), (64, 64)),
    lambda tokens: jnp.sum(tokens).astype(jnp.int32),
    lambda tokens: jnp.exp(tokens[..., None])[..., 0],
    lambda tokens: tokens.reshape(64, 1, 64),
    lambda tokens: jnp.float32(0.0),
    lambda tokens: jnp.max(tokens),
  ],
  ids=[
    *("tokens", "iota", "transposed", "all", "cumsum", "array", "spread sum"),
    *("rounded sum", "three axes", "reshaped", "number", "maximum"),
  ],
)
def test_other_functions_are_refused(function):
  with pytest.raises(Unsupported):
    row_functions.traced(lambda tokens: [function(tokens)], [TILE])
