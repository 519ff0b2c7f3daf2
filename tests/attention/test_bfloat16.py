"""Products and gradients of bfloat16 tokens, as in `jax.nn`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, normalizers
from attention.implementations.blockwise import Blockwise
from tests.attention.oracle import draw
from tests.matrix import sampled

TILES = Blockwise(query_block=64, key_block=64)
CALLS = {
  "reference": functools.partial(attend, implementation="reference"),
  "tiles": functools.partial(attend, implementation=TILES),
  "rows": functools.partial(
    attend, implementation=TILES, normalizer=normalizers.softpick()
  ),
}


def tokens():
  return draw(0, *[(2, 256, 32)] * 3, dtype=jnp.bfloat16)


def gradients(attention, *tokens):
  def loss(*tokens):
    weights = np.cos(np.arange(32.0, dtype="f4"))[None, None]
    return jnp.sum(attention(*tokens).astype(weights.dtype) * weights)

  return jax.grad(loss, (0, 1, 2))(*tokens)


def rounded_products(gradient, *tokens):
  """The platforms whose programs have products that round to bfloat16."""
  traced = jax.jit(gradient).trace(*tokens)
  programs = {
    platform: traced.lower(lowering_platforms=(platform,)).as_text()
    for platform in ("cpu", "cuda", "tpu")
  }
  return {name for name, text in programs.items() if "lhs_precision" in text}


@pytest.mark.parametrize("name", CALLS)
def test_accelerators_round_cotangents_to_bfloat16(name):
  gradient = functools.partial(gradients, CALLS[name])
  assert rounded_products(gradient, *tokens()) == {"cuda", "tpu"}


def test_float32_tokens_are_not_rounded():
  query, key, value = tokens()
  gradient = functools.partial(gradients, CALLS["tiles"])
  assert not rounded_products(gradient, query.astype("f4"), key, value)


def formula(query, key, value):
  return jax.nn.softmax(query @ key.mT / 32**0.5, axis=-1) @ value


def relative_errors(attention):
  """Of the gradients, in root mean square, against float64."""
  wide = [np.asarray(each).astype("f8") for each in tokens()]
  with jax.enable_x64(True):
    exact = jax.jit(functools.partial(gradients, formula))(*wide)
  found = jax.jit(functools.partial(gradients, attention))(*tokens())
  found, exact = (
    [np.asarray(each).astype("f8") for each in arrays]
    for arrays in (found, exact)
  )
  return np.array(
    [
      np.linalg.norm(mine - right) / np.linalg.norm(right)
      for mine, right in zip(found, exact)
    ]
  )


@sampled("name", ["reference", "tiles"], default=["tiles"])
def test_gradients_are_about_as_exact_as_those_of_jax_nn(name):
  def jax_nn(*tokens):
    swapped = (jnp.swapaxes(each, 0, 1) for each in tokens)
    context = jax.nn.dot_product_attention(*swapped, implementation="xla")
    return jnp.swapaxes(context, 0, 1)

  ours, theirs = map(relative_errors, (CALLS[name], jax_nn))
  assert (ours <= 1.1 * theirs).all(), (ours, theirs)


@pytest.mark.parametrize("name", ["reference", "tiles"])
def test_a_value_of_each_head_may_be_shared_by_a_batch(name):
  """XLA's CPU backend lacks the product that `einsum` would make of it."""
  query, key, value = draw(
    0, (2, 3, 10, 32), (2, 3, 20, 32), (1, 3, 20, 32), dtype=jnp.bfloat16
  )
  run = jax.jit(CALLS[name])
  shared = run(query, key, value)
  repeated = run(query, key, np.repeat(value, 2, axis=0))
  np.testing.assert_array_equal(shared, repeated)
