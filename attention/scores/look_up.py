"""Products by distance, looked up for each pair: [..., t, size] to [..., t, s].

Entry (i, j) is products[i, first + t - 1 - i + j], where numbers outside of the
table stand for its ends. On GPUs and TPUs a look-up is one operation, where
strips of a tile would be many.
"""

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.transforms.custom_transpose import with_mutual_transpose


def looked_up(length: int, first: jax.Array, products: jax.Array) -> jax.Array:
  """The entries of all pairs, whose transpose is a look-up too."""
  size = products.shape[-1]
  # JAX's transpose would be a scatter.
  return with_mutual_transpose(
    lambda residuals, arguments: [entries(length, *residuals, *arguments)],
    lambda residuals, arguments: [_sums(size, *residuals, *arguments)],
    [first],
    [products],
  )[0]


def entries(length, first, products) -> jax.Array:
  """`looked_up` in JAX's operations, also for symbolic sizes."""
  number, size = products.shape[-2:]
  places = jnp.clip(_numbers(number, length) + first, 0, size - 1)
  places = jnp.broadcast_to(places, (*products.shape[:-1], length))
  return jnp.take_along_axis(products, places, axis=-1, mode="clip")


def _numbers(number, length) -> jax.Array:
  """The numbers t - 1 - i + j of pairs, [t, s]."""
  rows = jnp.arange(number, dtype=jnp.int32)[:, None]
  return jnp.arange(length, dtype=jnp.int32)[None] + (number - 1 - rows)


def _sums(size, first, cotangent) -> jax.Array:
  """The transpose of `entries`."""
  number, length = cotangent.shape[-2:]
  if size == 1:
    return jnp.sum(cotangent, axis=-1, keepdims=True)
  rank = cotangent.ndim
  places = axes.with_rank(_numbers(number, length) + first, rank)

  def of_end(chosen):
    chosen = jnp.where(chosen, cotangent, 0.0)
    return jnp.sum(chosen, axis=-1, keepdims=True)

  # A vector between the ends belongs to one pair of each row.
  middle = jnp.arange(1, size - 1, dtype=jnp.int32)[None]
  columns = middle - first - _numbers(number, 1)
  inside = axes.with_rank((columns >= 0) & (columns < length), rank)
  columns = jnp.clip(columns, 0, length - 1)
  columns = jnp.broadcast_to(columns, (*cotangent.shape[:-1], size - 2))
  found = jnp.take_along_axis(cotangent, columns, axis=-1, mode="clip")
  return jnp.concatenate(
    [
      of_end(places <= 0),
      jnp.where(inside, found, 0.0),
      of_end(places >= size - 1),
    ],
    axis=-1,
  )
