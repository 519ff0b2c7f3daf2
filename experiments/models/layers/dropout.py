"""Dropout whose mask is a hash of the element's index.

A hash costs less than random bits, and XLA fuses it into the consumer, so that
no mask is stored for the backward pass.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn


class Dropout(nn.Module):
  """Sets elements to zero at random and scales up the others.

  See "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
  Srivastava et al., 2014. The rng collection is "dropout".
  """

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
  """Returns uint32 words of a shape, random enough for dropout.

  The mixing function is triple32 of C. Wellons, 2018
  (https://nullprogram.com/blog/2018/07/31/), in which each output bit depends
  nearly evenly on every input bit; the halves of the key enter early and late.
  `positions` are those of the entries of the last axis but one.
  """
  if math.prod(shape) >= 2**32:
    raise ValueError(
      f"a shape of less than 2^32 numbers is needed, got {shape}"
    )
  first, second = jax.random.bits(rng, (2,), jnp.uint32)
  word = _numbers(shape, positions) + first
  word = (word ^ (word >> 17)) * np.uint32(0xED5AD4BB)
  word = (word ^ (word >> 11)) * np.uint32(0xAC4C1B51)
  word = (word ^ (word >> 15) ^ second) * np.uint32(0x31848BAB)
  return word ^ (word >> 14)


def _numbers(shape, positions) -> jax.Array:
  """Returns a different integer for each element.

  The token axis, the last but one, is the most significant: the integers of a
  token do not depend on the number of tokens after it.
  """
  if len(shape) < 2:
    return jax.lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
  *rows, length, features = shape
  others = jax.lax.iota(jnp.uint32, math.prod(rows) * features)
  others = others.reshape(*rows, 1, features)
  each = positions(length).astype(jnp.uint32).reshape(*[1] * len(rows), -1, 1)
  return each * np.uint32(others.size) + others
