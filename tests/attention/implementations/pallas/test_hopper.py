"""The kernel for Hopper GPUs, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, biases, masks, scores
from attention.implementations import Pallas
from tests.attention.matrix import sampled
from tests.attention.oracle import draw

# The interpreter is not public in JAX 0.10.
params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
INTERPRETED = Pallas(target="hopper", interpret=params.InterpretGPUParams())


def arrays(*shapes, seed=0, dtype=jnp.bfloat16):
  return [jnp.asarray(each, dtype) for each in draw(seed, *shapes)]


def arguments(name):
  weights = arrays((64, 8), (64, 8), (8,), seed=1, dtype=jnp.float32)
  additive = scores.additive(*(0.3 * each for each in weights))
  return {
    "dot": {},
    "causal": {"mask": masks.causal(40)},
    "additive": {"score": additive},
    "additive window": {
      "score": additive,
      "mask": masks.sliding_window(20, 5),
    },
  }[name]


@sampled("name", ["dot", "causal", "additive", "additive window"], default=[])
def test_results_and_gradients_equal_the_reference(name):
  """With 50 queries and 100 keys, which are no whole tiles of 64."""
  options = arguments(name)
  tokens = arrays((50, 64), (100, 64), (100, 64))

  def results(implementation):
    def loss(*tokens):
      context, lse = attend(
        *tokens, **options, implementation=implementation, return_lse=True
      )
      seen = jnp.where(jnp.isneginf(lse), 0.0, lse)
      loss = jnp.sum(jnp.sin(context.astype(jnp.float32))) + jnp.sum(seen)
      return loss, (context, lse)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*tokens)

  def close(got, want):
    got, want = (np.asarray(each, np.float32) for each in (got, want))
    finite = np.where(np.isfinite(want), want, 0.0)
    np.testing.assert_allclose(got, want, atol=0.02 * np.abs(finite).max())

  jax.tree.map(close, results(INTERPRETED), results("reference"))


def test_what_the_kernel_does_not_support_is_an_error_that_says_why():
  def refused(reason, features=64, dtype=jnp.bfloat16, **options):
    tokens = jnp.ones((2, 8, features), dtype)
    with pytest.raises(NotImplementedError, match=reason):
      attend(tokens, tokens, tokens, implementation=INTERPRETED, **options)

  refused("dot products and additive scores only", score=lambda q, k: q @ k.mT)
  refused("bfloat16 or float16", dtype=jnp.float32)
  refused("a multiple of 64", features=48)
  refused("does not support a bias", bias=biases.alibi(2))
  refused("a mask without arrays", mask=jnp.ones((8, 8), bool))
