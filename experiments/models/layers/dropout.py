"""Dropout whose mask is a hash of the element's index."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.hash_rng import check_size, hash_key, mixed


class Dropout(nn.Module):
  """Sets elements to zero at random, by the rng "dropout"; scales up others."""

  rate: float  # the probability of zero
  # The mask of a token depends on its position: (T) -> positions [T].
  positions: Callable[[int], jax.Array] = jnp.arange

  @nn.compact
  def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
    """Returns an array of the same shape."""
    if deterministic or not self.rate:
      return x
    words = hashed(self.make_rng("dropout"), x.shape, self.positions)
    kept = words >= np.uint32(self.rate * 2**32)
    return jnp.where(kept, x * jnp.asarray(1 / (1 - self.rate), x.dtype), 0)


def hashed(
  rng: jax.Array,
  shape: tuple[int, ...],
  positions: Callable[[int], jax.Array] = jnp.arange,
) -> jax.Array:
  """Returns uint32 words of a shape; its last axis but one has `positions`."""
  check_size(shape)
  first, second = jax.random.key_data(hash_key(rng))
  return mixed(_numbers(shape, positions) + first, second)


def _numbers(shape, positions) -> jax.Array:
  """Returns a different integer for each element."""
  if len(shape) < 2:
    return jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
  # The tokens' axis is the most significant, so that the integers of a token do
  # not depend on the number of tokens after it.
  *rows, length, features = shape
  others = jax.lax.iota(jnp.uint32, math.prod(rows) * features)
  others = others.reshape(*rows, 1, features)
  each = positions(length).astype(jnp.uint32).reshape(*[1] * len(rows), -1, 1)
  return each * np.uint32(others.size) + others
