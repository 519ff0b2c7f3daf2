"""Masks and biases of one tile, inside a kernel.

Each type reads its arrays from a `Source`, so that a tile loads only the blocks
that belong to it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import biases
from attention.implementations.pallas.look_up import by_distance
from attention.implementations.pallas.operands import (
  Kind,
  Source,
  Unsupported,
  aligned_left,
  aligned_right,
)
from attention.masks import types as masks
from attention.positional import (
  AtPositions,
  GroupHeads,
  Pairwise,
  SelectHeads,
  Shift,
  Transform,
)


@dataclasses.dataclass(frozen=True)
class Tile:
  """Where a tile lies, and what supplies its arrays."""

  # `queries` [t, 1] and `keys` [1, s] are the positions at which a mask or bias
  # is evaluated. `at_rows` says that they are those of the tile itself.

  source: Source
  queries: jax.Array
  keys: jax.Array
  rank: int
  own_queries: bool = True
  own_keys: bool = True
  are_consecutive: bool = True
  # (K, G) where two axes of the context are one axis of the arrays.
  grouping: tuple[int, int] | None = None
  heads: SelectHeads | None = None  # of the arrays, if not all
  # (T, S), if arrays can be read at other positions than the tile's own.
  lengths: tuple[int, int] | None = None
  # What shifts have added to the positions of queries and of keys.
  shifts: tuple[Any, Any] = (0, 0)

  def moved(self, array: jax.Array, axis: int, of_keys: bool) -> jax.Array:
    """An array whose entries along an axis are those of own positions."""
    shift = self.shifts[of_keys]
    if array.shape[axis] == 1 or (isinstance(shift, int) and shift == 0):
      return array
    assert self.lengths is not None
    index = shift + jnp.arange(self.lengths[of_keys])
    return jnp.take(array, index, axis=axis, mode="clip")

  def number(self, value: Any, axes) -> Any:
    """A number for each leading entry."""
    if isinstance(value, int | float):
      return value
    return self.source.read(value, Kind.SCALAR, axes)

  def by_distance(self, numbers: jax.Array, max_distance: int) -> jax.Array:
    """numbers[clip(j - i, -m, m) + m] of all pairs, from numbers [2m + 1]."""
    if not self.are_consecutive:
      raise Unsupported(
        "does not support biases by distance at given positions"
      )
    (queries, _), (_, keys) = self.queries.shape, self.keys.shape
    first = self.keys[0, 0] - self.queries[-1, 0] + max_distance
    numbers = jnp.broadcast_to(numbers, (queries, numbers.shape[-1]))
    return by_distance(keys, first, numbers)


@functools.singledispatch
def values(pairs: Pairwise, tile: Tile) -> jax.Array:
  """The values of a mask or bias in a tile, broadcast to [t, s]."""
  raise Unsupported(
    f"does not support {type(pairs).__name__} as a mask or a bias"
  )


@values.register
def _(pairs: masks.Band, tile: Tile):
  distance = tile.keys - tile.queries
  visible = jnp.ones(distance.shape, bool)
  if pairs.left is not None:
    visible = visible & (distance >= -_left_aligned(pairs.left, tile))
  if pairs.right is not None:
    visible = visible & (distance <= _left_aligned(pairs.right, tile))
  return visible


@values.register
def _(pairs: masks.Below, tile: Tile):
  return tile.keys < _left_aligned(pairs.limit, tile)


@values.register
def _(pairs: masks.Segments, tile: Tile):
  _require_places(pairs, tile)
  query_ids = tile.moved(jnp.asarray(pairs.query_ids), -1, of_keys=False)
  key_ids = tile.moved(jnp.asarray(pairs.key_ids), -1, of_keys=True)
  return tile.source.read(
    query_ids, Kind.COLUMN, aligned_left(query_ids.shape[:-1])
  ) == tile.source.read(key_ids, Kind.ROW, aligned_left(key_ids.shape[:-1]))


@values.register
def _(pairs: masks.Where, tile: Tile):
  visible = pairs.function(tile.queries, tile.keys)
  if jnp.result_type(visible) != jnp.bool_ or jnp.ndim(visible) != 2:
    raise Unsupported(
      "supports functions of masks.where that return booleans [t, s], got "
      f"{jnp.result_type(visible)} of shape {jnp.shape(visible)}"
    )
  return visible


@values.register
def _(pairs: masks.ArrayMask, tile: Tile):
  return _of_array(pairs, tile) != 0


@values.register
def _(pairs: masks.Combined, tile: Tile):
  left, right = values(pairs.left, tile), values(pairs.right, tile)
  return left & right if pairs.operation == "and" else left | right


@values.register
def _(pairs: masks.MaskView, tile: Tile):
  return transformed(pairs.transform, pairs.inner, tile)


@values.register
def _(pairs: biases.Alibi, tile: Tile):
  # The bias at distance 1 is the slope of each head.
  slopes = pairs.block(np.arange(1), np.arange(1, 2), 1)[:, 0, 0]
  distance = jnp.abs(tile.keys - tile.queries)
  return _of_heads(slopes, tile) * distance.astype(slopes.dtype)


@values.register
def _(pairs: biases.ByDistance, tile: Tile):
  numbers, axes = _split(pairs.numbers, 1, tile)
  numbers = tile.source.read(numbers, Kind.WHOLE, axes)
  return tile.by_distance(numbers, pairs.max_distance)


@values.register
def _(pairs: biases.ArrayBias, tile: Tile):
  return _of_array(pairs, tile)


@values.register
def _(pairs: biases.Sum, tile: Tile):
  return values(pairs.left, tile) + values(pairs.right, tile)


@values.register
def _(pairs: biases.Scaled, tile: Tile):
  inner = values(pairs.inner, tile)
  factor = _of_heads(pairs.factor, tile)
  hidden = inner == -jnp.inf
  scaled = jnp.where(hidden, 0.0, inner) * factor
  return jnp.where(hidden, -jnp.inf, scaled)


@values.register
def _(pairs: biases.BiasView, tile: Tile):
  return transformed(pairs.transform, pairs.inner, tile)


@functools.singledispatch
def transformed(change: Transform, inner: Pairwise, tile: Tile) -> jax.Array:
  """The values of `inner`, changed by a transform."""
  raise Unsupported(f"does not support {type(change).__name__} of a mask")


@transformed.register
def _(change: masks.Invert, inner: Pairwise, tile: Tile):
  del change
  return ~values(inner, tile)


@transformed.register
def _(change: Shift, inner: Pairwise, tile: Tile):
  queries, keys = tile.queries, tile.keys
  row_shift, column_shift = tile.shifts
  if not isinstance(change.row, int) or change.row:
    queries = queries + tile.number(change.row, ())
    row_shift = row_shift + change.row
  if change.column is not None:
    keys = keys + tile.number(change.column, ())
    column_shift = column_shift + change.column
  moved = dataclasses.replace(
    tile,
    queries=queries,
    keys=keys,
    own_queries=tile.own_queries and queries is tile.queries,
    own_keys=tile.own_keys and keys is tile.keys,
    shifts=(row_shift, column_shift),
  )
  return values(inner, moved)


@transformed.register
def _(change: AtPositions, inner: Pairwise, tile: Tile):
  _require_own(inner, tile)
  rows, columns = change.rows, change.columns
  queries = tile.source.read(rows, Kind.COLUMN, aligned_left(rows.shape[:-1]))
  keys, own_keys = tile.keys, True
  if columns is not None:
    axes = aligned_left(columns.shape[:-1])
    keys, own_keys = tile.source.read(columns, Kind.ROW, axes), False
  moved = dataclasses.replace(
    tile,
    queries=queries,
    keys=keys,
    own_queries=False,
    own_keys=own_keys,
    are_consecutive=False,
    lengths=None,
  )
  return values(inner, moved)


@transformed.register
def _(change: GroupHeads, inner: Pairwise, tile: Tile):
  heads = change.num_key_value_heads, change.num_groups
  return values(inner, dataclasses.replace(tile, grouping=heads))


@transformed.register
def _(change: SelectHeads, inner: Pairwise, tile: Tile):
  return values(inner, dataclasses.replace(tile, heads=change))


def _require_places(pairs, tile):
  """Raises unless the entries of an array at the positions are known."""
  if tile.lengths is None:
    _require_own(pairs, tile)


def _require_own(pairs, tile):
  if not (tile.own_queries and tile.own_keys):
    raise Unsupported(
      f"does not support {type(pairs).__name__} at shifted positions"
    )


def _left_aligned(parameter, tile: Tile):
  """A parameter [B...] that belongs to the leftmost leading axes."""
  if isinstance(parameter, int):
    return parameter
  leading = jnp.shape(parameter)
  rank = tile.rank - (tile.grouping is not None)
  if len(leading) == rank:
    return _of_heads(parameter, tile)
  return tile.number(parameter, aligned_left(leading))


def _of_heads(parameter, tile: Tile):
  """A parameter [...,  H] that belongs to the rightmost leading axes."""
  if isinstance(parameter, int | float):
    return parameter
  array = jnp.asarray(parameter)
  array, axes = _split(array, array.ndim, tile)
  return tile.number(array, axes)


def _split(array, leading: int, tile: Tile):
  """An array whose axis of heads is like the context's, and its axes."""
  sizes = array.shape[:leading]
  if tile.heads is not None and sizes and sizes[-1] > 1:
    first, count = tile.heads.first, tile.heads.count
    array = jax.lax.dynamic_slice_in_dim(array, first, count, axis=leading - 1)
    sizes = array.shape[:leading]
  if tile.grouping is not None and sizes:
    key_heads, groups = tile.grouping
    heads = (1, 1) if sizes[-1] == 1 else (key_heads, groups)
    array = array.reshape(*sizes[:-1], *heads, *array.shape[leading:])
    sizes = array.shape[: leading + 1]
  return array, aligned_right(sizes, tile.rank)


def _of_array(pairs: Any, tile: Tile):
  """The tile of an array [..., T, S] that broadcasts."""
  _require_places(pairs, tile)
  array = jnp.asarray(pairs.array)
  array = array.reshape((1,) * (2 - array.ndim) + array.shape)
  array = tile.moved(tile.moved(array, -2, of_keys=False), -1, of_keys=True)
  if array.dtype == jnp.bool_:
    array = array.astype(jnp.int8)
  array, axes = _split(array, array.ndim - 2, tile)
  queries, keys = array.shape[-2:]
  if queries > 1 and keys > 1:
    return tile.source.read(array, Kind.TILE, axes)
  if queries > 1:
    return tile.source.read(array[..., 0], Kind.COLUMN, axes)
  if keys > 1:
    return tile.source.read(array[..., 0, :], Kind.ROW, axes)
  return tile.source.read(array[..., 0, 0], Kind.SCALAR, axes)
