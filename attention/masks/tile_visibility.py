"""The visibility of each tile under a mask, computed when tracing."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from attention.masks.types import (
  ArrayMask,
  Band,
  Below,
  Combined,
  Invert,
  Mask,
  MaskView,
  Segments,
  Where,
)
from attention.positional.base import EMPTY, FULL, PARTIAL, AtPositions, Shift


@dataclasses.dataclass(frozen=True)
class Ranges:
  """Ranges of positions, given by the first and the last of each."""

  first: np.ndarray
  last: np.ndarray

  @classmethod
  def cut(cls, length: int, size: int) -> "Ranges":
    """Ranges of `size` positions; the last one may be shorter."""
    first = np.arange(0, length, size, dtype=np.int64)
    return cls(first, np.minimum(first + size, length) - 1)

  def __len__(self):
    return len(self.first)


def grid_visibility(
  mask: Mask | None, lengths: Sequence[int], tile: Sequence[int]
) -> np.ndarray:
  """The visibility of each tile of T x S pairs; None hides no pair."""
  rows, columns = map(Ranges.cut, lengths, tile)
  if mask is None:
    tiles = np.full((len(rows), len(columns)), FULL, np.int8)
  else:
    tiles = np.array(visibility(mask, rows, columns))
  if lengths[1] % tile[1]:
    # The last tile reaches over the edge, where there are no keys.
    tiles[:, -1] = np.minimum(tiles[:, -1], PARTIAL)
  return tiles


def visibility(mask: Mask, rows: Ranges, columns: Ranges) -> np.ndarray:
  """int8 [n, m], EMPTY, PARTIAL or FULL, for n rows and m columns of tiles."""
  # A tile is FULL or EMPTY if it is so in all batch entries and heads.
  if isinstance(mask, Combined):
    combine = np.minimum if mask.operation == "and" else np.maximum
    parts = mask.left, mask.right
    return combine(*(visibility(part, rows, columns) for part in parts))
  if isinstance(mask, MaskView):
    return _of_view(mask, rows, columns)
  is_traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(mask))
  known = None if is_traced else _every_and_some(mask, rows, columns)
  shape = len(rows), len(columns)
  if known is None:
    return np.full(shape, PARTIAL, np.int8)
  every, some = known
  tiles = np.where(
    np.all(every, axis=_leading_axes(every)),
    FULL,
    np.where(np.any(some, axis=_leading_axes(some)), PARTIAL, EMPTY),
  )
  return np.broadcast_to(tiles.astype(np.int8), shape)


def _leading_axes(tiles: np.ndarray) -> tuple[int, ...]:
  return tuple(range(tiles.ndim - 2))


def _of_view(mask: MaskView, rows: Ranges, columns: Ranges) -> np.ndarray:
  """The visibility of a mask that is changed by a `Transform`."""
  change = mask.transform
  if isinstance(change, AtPositions):
    return np.full((len(rows), len(columns)), PARTIAL, np.int8)
  if isinstance(change, Shift):
    is_traced = isinstance(change.row, jax.core.Tracer)
    if is_traced or change.column is not None:
      return np.full((len(rows), len(columns)), PARTIAL, np.int8)
    offset = int(change.row)
    rows = Ranges(rows.first + offset, rows.last + offset)
  tiles = visibility(mask.inner, rows, columns)
  return FULL - tiles if isinstance(change, Invert) else tiles


@functools.singledispatch
def _every_and_some(mask: Mask, rows: Ranges, columns: Ranges):
  """Whether a mask shows every and some pair, [..., n, m]; None if unknown."""
  del mask, rows, columns


@_every_and_some.register
def _(mask: Band, rows: Ranges, columns: Ranges):
  nearest = columns.first[None, :] - rows.last[:, None]
  farthest = columns.last[None, :] - rows.first[:, None]
  every = some = np.ones(nearest.shape, bool)
  if mask.left is not None:
    left = np.asarray(mask.left, np.int64)
    every = every & (nearest >= -left.min())
    some = some & (farthest >= -left.max())
  if mask.right is not None:
    right = np.asarray(mask.right, np.int64)
    every = every & (farthest <= right.min())
    some = some & (nearest <= right.max())
  return every, some


@_every_and_some.register
def _(mask: Below, rows: Ranges, columns: Ranges):
  del rows
  limit = np.asarray(mask.limit, np.int64)
  every, some = columns.last < limit.min(), columns.first < limit.max()
  return every[None, :], some[None, :]


@_every_and_some.register
def _(mask: Segments, rows: Ranges, columns: Ranges):
  query_ids, key_ids = np.asarray(mask.query_ids), np.asarray(mask.key_ids)
  if not _inside(rows, query_ids, -1) or not _inside(columns, key_ids, -1):
    return None
  query_low, query_high = (
    _reduced(extreme, query_ids, rows, -1)[..., :, None]
    for extreme in (np.minimum, np.maximum)
  )
  key_low, key_high = (
    _reduced(extreme, key_ids, columns, -1)[..., None, :]
    for extreme in (np.minimum, np.maximum)
  )
  every = (query_low == key_high) & (query_high == key_low)
  return every, (query_high >= key_low) & (query_low <= key_high)


@_every_and_some.register
def _(mask: ArrayMask, rows: Ranges, columns: Ranges):
  array = np.atleast_2d(np.asarray(mask.array))
  if not _inside(rows, array, -2) or not _inside(columns, array, -1):
    return None
  return tuple(
    _reduced(combine, _reduced(combine, array, rows, -2), columns, -1)
    for combine in (np.logical_and, np.logical_or)
  )


@_every_and_some.register
def _(mask: Where, rows: Ranges, columns: Ranges):
  if not len(rows) or not len(columns):
    return None
  keys = np.arange(columns.first[0], columns.last[-1] + 1, dtype=np.int32)
  starts = columns.first - columns.first[0]
  every: list[np.ndarray] = []
  some: list[np.ndarray] = []
  # The positions are known, so the function need not be traced. The rank of the
  # scores is unknown here, so arrays of heads may promote positions.
  with jax.ensure_compile_time_eval(), jax.numpy_rank_promotion("allow"):
    for first, last in zip(rows.first, rows.last):
      queries = np.arange(first, last + 1, dtype=np.int32)
      visible = mask.block(queries, keys, 0)
      if isinstance(visible, jax.core.Tracer):
        return None
      shape = (*visible.shape[:-2], len(queries), len(keys))
      pairs = np.broadcast_to(np.asarray(visible), shape)
      for kind, combine in ((every, np.logical_and), (some, np.logical_or)):
        of_row = combine.reduce(pairs, axis=-2)
        kind.append(combine.reduceat(of_row, starts, axis=-1))
  return np.stack(every, axis=-2), np.stack(some, axis=-2)


def _inside(ranges: Ranges, array: np.ndarray, axis: int) -> bool:
  """Whether an axis has all these positions; an axis of size 1 broadcasts."""
  length = array.shape[axis]
  return length == 1 or (ranges.first[0] >= 0 and ranges.last[-1] < length)


def _reduced(combine: np.ufunc, array, ranges: Ranges, axis: int):
  """Reduces each range of an axis to one entry, unless its size is 1."""
  if array.shape[axis] == 1:
    return array
  return combine.reduceat(array, ranges.first, axis=axis)
