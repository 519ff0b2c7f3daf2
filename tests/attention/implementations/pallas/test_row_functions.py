import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.implementations.pallas.hopper import row_functions
from attention.implementations.pallas.operands import Unsupported
from tests.attention.oracle import draw

# The interpreter is not public in JAX 0.10.
params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
INTERPRETED = params.InterpretGPUParams()
TILE = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


def normalised(tokens, number):
  wide = tokens.astype(jnp.float32)
  square = jnp.sum(wide * wide, axis=-1, keepdims=True)
  size = jnp.max(jnp.abs(wide), axis=-1)[:, None]
  is_small = jnp.where(size < 2.5, 0.5, 1.0)
  return (number * wide * jax.lax.rsqrt(square) * is_small).astype(tokens.dtype)


def test_a_kernel_transposes_a_function_of_rows():
  tokens, cotangents = (
    jnp.asarray(each, jnp.bfloat16) for each in draw(0, (128, 64), (128, 64))
  )
  number = jnp.float32(1.5)

  def pull_back(tokens, cotangents, number):
    return jax.vjp(normalised, tokens, number)[1](cotangents)

  function = row_functions.traced(pull_back, [TILE, TILE, NUMBER])
  of_tokens, parts = row_functions.call(
    function,
    [tokens, cotangents],
    [number[None]],
    [
      jax.ShapeDtypeStruct((128, 64), jnp.float32),
      jax.ShapeDtypeStruct((2,), jnp.float32),
    ],
    interpret=INTERPRETED,
  )
  wide = [each.astype(jnp.float32) for each in (tokens, cotangents)]
  expected = pull_back(*wide, number)
  np.testing.assert_allclose(of_tokens, expected[0], atol=1e-5)
  np.testing.assert_allclose(jnp.sum(parts), expected[1], rtol=1e-5)


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
