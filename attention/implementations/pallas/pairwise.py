"""Masks and biases of one tile, inside a kernel."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from attention import biases
from attention.implementations.pallas.operands import (
  Kind,
  Unsupported,
  aligned_left,
)
from attention.implementations.pallas.pair_tile import Tile
from attention.masks import types as masks
from attention.positional import (
  AtPositions,
  GroupHeads,
  Pairwise,
  SelectHeads,
  Shift,
  Transform,
)


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
    visible = visible & (distance >= -tile.left_aligned(pairs.left))
  if pairs.right is not None:
    visible = visible & (distance <= tile.left_aligned(pairs.right))
  return visible


@values.register
def _(pairs: masks.Below, tile: Tile):
  return tile.keys < tile.left_aligned(pairs.limit)


@values.register
def _(pairs: masks.Segments, tile: Tile):
  tile.require_places(pairs)
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
  return tile.of_array(pairs) != 0


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
  return tile.of_heads(slopes) * distance.astype(slopes.dtype)


@values.register
def _(pairs: biases.ByDistance, tile: Tile):
  numbers = tile.row_of_heads(pairs.numbers)
  return tile.by_distance(numbers, pairs.max_distance)


@values.register
def _(pairs: biases.ByBucket, tile: Tile):
  numbers = tile.row_of_heads(pairs.numbers)
  return tile.by_bucket(numbers, pairs.buckets)


@values.register
def _(pairs: biases.ArrayBias, tile: Tile):
  return tile.of_array(pairs)


@values.register
def _(pairs: biases.Sum, tile: Tile):
  return values(pairs.left, tile) + values(pairs.right, tile)


@values.register
def _(pairs: biases.Scaled, tile: Tile):
  inner = values(pairs.inner, tile)
  factor = tile.of_heads(pairs.factor)
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
  tile.require_own(inner)
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
