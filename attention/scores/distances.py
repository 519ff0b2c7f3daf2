"""Products of tokens with vectors that depend on the distance of a pair.

A tile's queries and keys are consecutive, so it has t + s - 1 distances and not
t s. A product with one vector for each distance, [t, t + s], is skewed to the
scores [t, s]; no array has D numbers for each pair. On CPUs tokens are
multiplied strip by strip, so that a strip has few more distances than keys, or
with the whole table if it is small. On GPUs and TPUs they are multiplied with
the whole table, and pairs look up their products.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.matmul import inner_products, products_with_columns
from attention.scores.look_up import entries, looked_up
from attention.scores.narrow_band import STRIP, is_narrow, narrow_band
from attention.scores.skew import skewed

# The tokens of a strip, and the most strips that are multiplied at once.
_STRIP, _MOST_STRIPS = 128, 16


def with_products(
  scores: jax.Array,
  tokens,
  table: jax.Array,
  first,
  *,
  by_key: bool = False,
  is_descending: bool = False,
  look_up: Callable | None = None,
) -> jax.Array:
  """Scores [..., t, s] plus query_i . table[first + t - 1 - i + j].

  Numbers outside of the table stand for its first and its last vector.

  Args:
    scores: the scores of a tile.
    tokens: the tile's queries [..., t, D], or its keys [..., s, D].
    table: [..., size, D].
    first: the number in the table for the last token of the tile and the first
      token that it is paired with.
    by_key: tokens are keys: adds key_j . table[first + s - 1 - j + i].
    is_descending: count from the end of the table.
    look_up: how a kernel looks up products, see `pallas.look_up`.
  """
  if 0 in scores.shape[-2:]:
    none = inner_products(*axes.aligned(tokens, table[..., :1, :]))
    return _sum(scores, _in_order(by_key, none))
  first = jnp.asarray(first, jnp.int32)
  if look_up is not None:
    look_up = functools.partial(look_up, is_descending=is_descending)
    return _by_look_up(look_up, by_key, scores, tokens, table, first)
  if is_descending:
    table = jnp.flip(table, -2)
  arrays = axes.varying_alike([scores, tokens, table, first])
  sizes = *scores.shape[-2:], *tokens.shape[-2:]
  if not all(isinstance(size, int) for size in sizes):
    return _by_look_up(entries, by_key, *arrays)
  return _on_its_platform(by_key, *arrays)


# Outside of `jax.jit` the branches would be compiled at every call. So would be
# those of the gradient, if this were inlined.
@functools.partial(jax.jit, static_argnums=0)
def _on_its_platform(by_key: bool, *arrays: jax.Array) -> jax.Array:
  """`with_products`, by the way that is fast on a platform."""
  return jax.lax.platform_dependent(
    *arrays,
    cpu=functools.partial(_in_strips, by_key),
    default=functools.partial(_by_look_up, looked_up, by_key),
  )


def _by_look_up(look_up, by_key, scores, tokens, table, first) -> jax.Array:
  """`with_products`, by a product with all vectors of the table."""
  products = inner_products(*axes.aligned(tokens, table))
  length = _in_order(by_key, scores).shape[-1]
  return _sum(scores, _in_order(by_key, look_up(length, first, products)))


def _in_order(by_key: bool, found) -> jax.Array:
  """Queries before keys."""
  return jnp.swapaxes(found, -1, -2) if by_key else found


def _in_strips(by_key, scores, tokens, table, first) -> jax.Array:
  """`with_products`, with a product for each distance of a strip."""
  number, size = tokens.shape[-2], table.shape[-2]
  length = _in_order(by_key, scores).shape[-1]
  in_order = functools.partial(_in_order, by_key)
  is_low, is_high = first + number + length - 2 <= 0, first >= size - 1

  low, high = table[..., :1, :], table[..., -1:, :]
  end = jnp.where(is_low, low, jnp.where(is_high, high, 0.0))
  ends = inner_products(*axes.aligned(tokens, end))
  # A sum after the `cond` would read the transposed products twice, entry by
  # entry. So would a sum after a product of `end` in the first branch.
  return jax.lax.cond(
    is_low | is_high,
    lambda: _sum(scores, in_order(ends)),
    lambda: _sum(scores, in_order(_band(tokens, table, first, length))),
  )


def _sum(left, right) -> jax.Array:
  left, right = axes.aligned(left, right)
  return left + right


def _band(tokens, table, first, length: int) -> jax.Array:
  """The products with the vector of each distance, skewed."""
  number, size = tokens.shape[-2], table.shape[-2]
  if number <= _MOST_STRIPS * STRIP and is_narrow(number, length, size):
    products = inner_products(*axes.aligned(tokens, table))
    return narrow_band(length, first, products)
  strip = math.gcd(number, _STRIP)
  strip = strip if strip >= 16 else number
  # `first` for each strip.
  firsts = first + jnp.arange(number - strip, -1, -strip, dtype=jnp.int32)
  if firsts.size <= _MOST_STRIPS:
    found = _of_strips(tokens, table, firsts, strip, length)
  else:
    found = _of_many_strips(tokens, table, firsts, strip, length)
  return jnp.reshape(found, (*found.shape[:-3], number, length))


def _of_strips(tokens, table, firsts, strip: int, length: int) -> jax.Array:
  """The products of each strip, [..., strips, strip, length]."""
  *leading, _, features = tokens.shape
  columns = _columns(table, firsts, strip + length)
  strips = jnp.reshape(tokens, (*leading, len(firsts), strip, features))
  return skewed(length, _strip_products(strips, columns))


def _of_many_strips(tokens, table, firsts, strip: int, length: int):
  """`_of_strips`, one after another: all at once would need much memory."""
  *leading, _, features = tokens.shape
  strips = jnp.reshape(tokens, (*leading, len(firsts), strip, features))

  @jax.checkpoint
  def of_strip(part):
    tokens, first = part
    return _of_strips(tokens, table, first[None], strip, length)

  found = jax.lax.map(of_strip, (jnp.moveaxis(strips, -3, 0), firsts))
  return jnp.moveaxis(found[..., 0, :, :], 0, -3)


def _strip_products(strips, columns) -> jax.Array:
  """[..., n, t, D] times [..., n, D, r]."""
  if math.prod(columns.shape[:-3]) > 1:
    return products_with_columns(*axes.aligned(strips, columns))
  # All heads are in one matrix product.
  *leading, number, size, features = strips.shape
  columns = jnp.reshape(columns, columns.shape[-3:])
  heads = math.prod(leading)
  strips = jnp.reshape(strips, (heads, number, size, features))
  strips = jnp.moveaxis(strips, 1, 0)
  strips = jnp.reshape(strips, (number, heads * size, features))
  found = products_with_columns(strips, columns)
  found = jnp.reshape(found, (number, heads, size, columns.shape[-1]))
  found = jnp.moveaxis(found, 0, 1)
  return jnp.reshape(found, (*leading, *found.shape[1:]))


def _columns(table, firsts, number: int) -> jax.Array:
  """table[first], table[first + 1], ... for each first, [..., n, D, number]."""
  # Outside of the table these are its ends. Slices of the padded table: a
  # gather's gradient is slow on CPUs.
  size, columns = table.shape[-2], jnp.swapaxes(table, -1, -2)
  shape = (*columns.shape[:-1], number)
  before, after = (
    jnp.broadcast_to(columns[..., end : end + 1], shape)
    for end in (0, size - 1)
  )
  padded = jnp.concatenate([before, columns, after], axis=-1)
  starts = jnp.clip(firsts + number, 0, size + number)
  return jnp.stack(
    [
      jax.lax.dynamic_slice_in_dim(padded, start, number, axis=-1)
      for start in starts
    ],
    axis=-3,
  )
