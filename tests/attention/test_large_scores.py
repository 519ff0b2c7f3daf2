"""Scores of large magnitude: weights and gradients keep their digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attend, merge
from attention.implementations.blockwise import Blockwise
from attention.ring import ring_attention
from tests.attention.comparison import close
from tests.attention.oracle import draw
from tests.meshes import make_mesh

LENGTH, KEYS = 4, 600
TILES = Blockwise(query_block=2, key_block=100)


def given(offset):
  """Values [S, 3], and a bias [T, S] whose entries are the scores."""
  noise, value = draw(3, (LENGTH, KEYS), (KEYS, 3))
  return np.float32(noise + offset), np.float32(value)


def expected(bias, value, cotangent):
  """The context and the gradients of bias and value, in float64."""
  bias, value = np.float64(bias), np.float64(value)
  exponentials = np.exp(bias - bias.max(-1, keepdims=True))
  weights = exponentials / exponentials.sum(-1, keepdims=True)
  context = weights @ value
  of_weights = cotangent @ value.T - np.sum(cotangent * context, -1)[:, None]
  return context, (weights * of_weights, weights.T @ cotangent)


@functools.partial(jax.jit, static_argnums=0)
def context_and_gradients(attend_to, bias, value):
  """The context of zero queries, and the gradients of its sum of squares."""

  def loss(bias, value):
    context = attend_to(
      jnp.zeros((LENGTH, 2)), jnp.zeros((KEYS, 2)), bias, value
    )
    return jnp.sum(context**2), context

  gradients, context = jax.grad(loss, (0, 1), has_aux=True)(bias, value)
  return context, gradients


def by_tiles(query, key, bias, value):
  return attend(query, key, value, bias=bias, implementation=TILES)


def by_ring(query, key, bias, value):
  def local(query, key, bias, value):
    return ring_attention(query, key, value, bias=bias, axis_name="sequence")

  shard, replicated = jax.P("sequence"), jax.P()
  return jax.shard_map(
    local,
    mesh=make_mesh(sequence=2),
    in_specs=(shard, shard, replicated, shard),
    out_specs=shard,
  )(query, key, bias, value)


def check(got, bias, value):
  context = expected(bias, value, np.zeros((LENGTH, 3)))[0]
  want = expected(bias, value, 2 * context)
  close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("offset", [1e4, 1e6, -1e9])
def test_gradients_of_several_tiles_equal_float64(offset):
  bias, value = given(offset)
  check(context_and_gradients(by_tiles, bias, value), bias, value)


@pytest.mark.parametrize("offset", [1e6, -1e9])
def test_gradients_of_ring_attention_equal_float64(offset):
  bias, value = given(offset)
  # The shards have different numbers of visible keys.
  bias[:, : KEYS // 3] = -np.inf
  check(context_and_gradients(by_ring, bias, value), bias, value)


def test_second_derivatives_of_large_scores_equal_those_of_small_ones():
  noise, value, direction = map(
    np.float32, draw(4, (LENGTH, KEYS), (KEYS, 3), (LENGTH, KEYS))
  )
  # Multiples of 1 / 4, which do not change when 2 ** 21 is added.
  noise = np.round(4 * noise) / 4

  def loss(bias):
    zeros = jnp.zeros((LENGTH, 2)), jnp.zeros((KEYS, 2))
    context = attend(*zeros, value, bias=bias, implementation=TILES)
    return jnp.sum(context**2)

  @jax.jit
  def product(bias):
    return jax.jvp(jax.grad(loss), (bias,), (jnp.asarray(direction),))[1]

  np.testing.assert_allclose(
    product(noise + np.float32(2.0**21)), product(noise), 1e-5, 1e-7
  )


def test_merged_parts_of_large_scores_weigh_equally():
  contexts = [np.full((1, 1), part, "f4") for part in range(4)]
  context, lse = jax.jit(merge)(contexts, [np.full((1,), -1e9, "f4")] * 4)
  np.testing.assert_allclose(context, [[1.5]])
  np.testing.assert_allclose(lse, [-1e9])
