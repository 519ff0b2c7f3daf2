"""The skew of products by distance to products by key, and its transpose."""

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.transforms.custom_transpose import with_mutual_transpose


def skewed(length: int, found: jax.Array) -> jax.Array:
  """[..., t, t + s] by distance, ascending, to [..., t, s] by key."""
  return with_mutual_transpose(
    lambda _, arguments: [skew(length, *arguments)],
    lambda _, arguments: [unskewed(*arguments)],
    [],
    [found],
  )[0]


def skew(length, found):
  """`skewed` in operations that JAX differentiates."""
  # Each row begins one entry earlier than the row before it, so that rows of
  # t + s - 1 entries of the flat array begin in one column.
  *leading, number, distances = found.shape
  flat = jax.lax.optimization_barrier(
    jnp.reshape(found, (*leading, number * distances))
  )
  size = number * (distances - 1)
  flat = jax.lax.slice_in_dim(flat, number - 1, number - 1 + size, axis=-1)
  rows = jnp.reshape(flat, (*leading, number, distances - 1))
  return rows[..., :length]


def unskewed(cotangent):
  """The transpose of `skew`, [..., t, s] to [..., t, t + s]."""
  # XLA pads entry by entry, with a division for each: a look-up is faster.
  *leading, number, length = cotangent.shape
  row = jnp.arange(number, dtype=jnp.int32)[:, None]
  column = jnp.arange(number + length, dtype=jnp.int32)[None]
  column = column + row - (number - 1)
  inside = (column >= 0) & (column < length)
  flat = jnp.reshape(cotangent, (*leading, number * length))
  flat = jax.lax.optimization_barrier(flat)
  index = row * length + jnp.clip(column, 0, length - 1)
  found = jnp.take(flat, index, axis=-1, mode="clip")
  return jnp.where(axes.with_rank(inside, found.ndim), found, 0.0)
