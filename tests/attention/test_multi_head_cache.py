"""The pure multi-head attention with rotary positions and a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import biases, cache, masks, multi_head_attention, scores
from attention.modules import MultiHeadAttention

NAMES = ("query", "key", "value", "output")


def pure_arguments(variables):
  """The weights and the biases of a module, for the pure function."""
  projections = [variables["params"][f"{name}_projection"] for name in NAMES]
  weights = [projection["kernel"] for projection in projections]
  added = {
    f"{name}_bias": projection["bias"]
    for name, projection in zip(NAMES, projections)
  }
  return weights, added


@pytest.mark.parametrize("num_key_value_heads", [4, 1])
def test_the_cache_equals_the_module_and_recomputation(num_key_value_heads):
  tokens = jax.random.normal(jax.random.key(0), (2, 5, 16))
  module = MultiHeadAttention(
    4,
    num_key_value_heads=num_key_value_heads,
    rotary=True,
    bias_init=jax.nn.initializers.normal(1.0),
  )
  variables = jax.jit(module.init)(jax.random.key(1), tokens)
  window, alibi = masks.sliding_window(3, None), biases.alibi(4)
  weights, added = pure_arguments(variables)

  @jax.jit
  def attend(tokens, cache, mask):
    options = {"rotary": True, "mask": mask, "bias": alibi, "cache": cache}
    return multi_head_attention(
      tokens, tokens, tokens, *weights, **added, **options
    )

  whole = attend(tokens, None, masks.causal() & window)
  by_module = jax.jit(module.apply)(
    variables, tokens, mask=masks.causal() & window, bias=alibi
  )
  np.testing.assert_allclose(whole, by_module, rtol=1e-4, atol=1e-5)
  held = cache.init((2, num_key_value_heads), 8, 4)
  start, held = attend(tokens[:, :3], held, window)
  rest, held = attend(tokens[:, 3:], held, window)
  got = jnp.concatenate([start, rest], axis=1)
  np.testing.assert_allclose(got, whole, rtol=1e-4, atol=1e-5)
  assert int(held.length) == 5
  own = module.apply(variables, (2,), 8, method="init_cache")
  assert (own.key.shape, own.value.shape) == (held.key.shape, held.value.shape)
  decoded, _ = jax.jit(functools.partial(module.apply, method="decode"))(
    variables, tokens, own, mask=window, bias=alibi
  )
  np.testing.assert_allclose(decoded, whole, rtol=1e-4, atol=1e-5)


def test_additive_score_caches_projected_keys():
  draw = jax.random.normal
  keys = iter(jax.random.split(jax.random.key(0), 9))
  tokens = draw(next(keys), (4, 6))
  weights = [draw(next(keys), (6, 4, 3)), *draw(next(keys), (2, 6, 2, 3))]
  weights.append(draw(next(keys), (4, 3, 6)))
  score = scores.additive(
    *draw(next(keys), (1, 4, 3, 5)),
    *draw(next(keys), (1, 2, 3, 5)),
    draw(next(keys), (4, 5)),
  )
  want = multi_head_attention(
    tokens, tokens, tokens, *weights, score=score, mask=masks.causal()
  )
  got, _ = multi_head_attention(
    tokens,
    tokens,
    tokens,
    *weights,
    score=score,
    cache=cache.init((2,), 4, key_size=5, value_size=3),
  )
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
