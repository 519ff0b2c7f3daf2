"""Products by distance, placed by key, for tables of few distances.

Entry (i, j) of the result is the product of token i with the vector of the
distance of its pair. Beyond the ends of the table a row is constant. The band
between them is placed strip by strip; strips without a part of it are skipped.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.scores.skew import skew, unskewed
from attention.transforms.custom_transpose import with_mutual_transpose

STRIP = 32  # the tokens of a strip


def is_narrow(number: int, length: int, size: int) -> bool:
  """Whether a table of `size` distances has a narrow band in a tile."""
  whole_strips = number % STRIP == length % STRIP == 0
  return size > 1 and whole_strips and 2 * _width(size) <= length


def _width(size: int) -> int:
  """The columns that a strip has of the band, in whole strips of columns."""
  return axes.round_up(STRIP + size - 2, STRIP) + STRIP


def narrow_band(length: int, first: jax.Array, products: jax.Array):
  """products[i, clip(first + t - 1 - i + j)], from [..., t, size], [..., t, s].

  Args:
    length: s.
    first: the number in the table for the last token and column 0.
    products: of each token with each vector of the table.
  """
  size = products.shape[-1]
  return with_mutual_transpose(
    lambda residuals, arguments: [_place(length, *residuals, *arguments)],
    lambda residuals, arguments: [_take(size, *residuals, *arguments)],
    [first],
    [products],
  )[0]


class _Strips(NamedTuple):
  """Where strips have the band."""

  begins: jax.Array  # the first of `width` columns, [strips]
  offsets: jax.Array  # the number in the table of the strip's last row there
  bounds: tuple[jax.Array, jax.Array]  # of the strips that have a part of it


def _strips(first, number: int, length: int, width: int) -> _Strips:
  last_rows = jnp.arange(STRIP - 1, number, STRIP, dtype=jnp.int32)
  in_column_0 = first + (number - 1) - last_rows
  # Whole strips of columns let the cotangents of ends be sums over these.
  begins = (1 - STRIP - in_column_0) // STRIP * STRIP
  is_before, is_after = begins + width <= 0, begins >= length
  inside = jnp.clip(begins, 0, length - width)
  begins = jnp.where(is_before | is_after, begins, inside)
  lower = jnp.sum(is_before, dtype=jnp.int32)
  upper = len(last_rows) - jnp.sum(is_after, dtype=jnp.int32)
  return _Strips(begins, in_column_0 + begins, (lower, upper))


def _place(length, first, products):
  *leading, number, size = products.shape
  width = _width(size)
  strips = _strips(first, number, length, width)
  low, high = products[..., :1], products[..., -1:]
  begins = jnp.repeat(strips.begins, STRIP, total_repeat_length=number)
  is_low = jnp.arange(length, dtype=jnp.int32)[None] < begins[:, None]
  placed = jnp.where(axes.with_rank(is_low, products.ndim), low, high)

  def place(n, placed):
    strip = _rows(products, n)
    # The products of the distances of all columns, and of more on both sides.
    edge = width + STRIP
    edges = [
      jnp.broadcast_to(end, (*leading, STRIP, edge))
      for end in (strip[..., :1], strip[..., -1:])
    ]
    wide = jnp.concatenate([edges[0], strip, edges[1]], axis=-1)
    found = jax.lax.dynamic_slice_in_dim(
      wide, edge + strips.offsets[n], edge, axis=-1
    )
    start = _start(leading, n * STRIP, strips.begins[n])
    return jax.lax.dynamic_update_slice(placed, skew(width, found), start)

  return jax.lax.fori_loop(*strips.bounds, place, placed)


def _take(size, first, cotangent):
  """The transpose of `_place`."""
  *leading, number, length = cotangent.shape
  width = _width(size)
  edge = width + STRIP
  strips = _strips(first, number, length, width)
  # XLA's CPU backend is slow to sum what it selects, and fast to sum an array.
  shape = (*leading, number // STRIP, STRIP, length // STRIP, STRIP)
  sums = jnp.sum(jnp.reshape(cotangent, shape), axis=-1)
  starts = jnp.arange(0, length, STRIP, dtype=jnp.int32)[None, None]
  begins = strips.begins[:, None, None]

  def of_end(chosen):
    chosen = axes.with_rank(chosen, sums.ndim)
    total = jnp.sum(jnp.where(chosen, sums, 0.0), axis=-1)
    return jnp.reshape(total, (*leading, number, 1))

  def with_ends(middle, low, high):
    low, high = middle[..., :1] + low, middle[..., -1:] + high
    return jnp.concatenate([low, middle[..., 1:-1], high], axis=-1)

  def take(n, taken):
    start = _start(leading, n * STRIP, strips.begins[n])
    found = jax.lax.dynamic_slice(cotangent, start, (*leading, STRIP, width))
    wide = jnp.zeros((*leading, STRIP, size + 2 * edge), cotangent.dtype)
    wide = jax.lax.dynamic_update_slice_in_dim(
      wide, unskewed(found), edge + strips.offsets[n], axis=-1
    )
    strip = with_ends(
      wide[..., edge : edge + size],
      jnp.sum(wide[..., :edge], axis=-1, keepdims=True),
      jnp.sum(wide[..., edge + size :], axis=-1, keepdims=True),
    )
    strip += _rows(taken, n)
    return jax.lax.dynamic_update_slice(
      taken, strip, _start(leading, n * STRIP, 0)
    )

  ends = of_end(starts < begins), of_end(starts >= begins + width)
  zeros = jnp.zeros((*leading, number, size), cotangent.dtype)
  return jax.lax.fori_loop(*strips.bounds, take, with_ends(zeros, *ends))


def _rows(array, n):
  """The rows of strip n, [..., STRIP, columns]."""
  return jax.lax.dynamic_slice_in_dim(array, n * STRIP, STRIP, axis=-2)


def _start(leading, row, column) -> list[jax.Array]:
  return [
    jnp.asarray(n, jnp.int32) for n in (*(0,) * len(leading), row, column)
  ]
