"""The visibility of each tile under a mask, computed when tracing.

In a FULL tile the mask shows every pair, in an EMPTY one none, in all batch
entries and heads. All other tiles are PARTIAL, and all tiles are if a parameter
of the mask is traced.
"""

import dataclasses
import functools
from typing import Any

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
)
from attention.positional import EMPTY, FULL, PARTIAL, Shift


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


@functools.singledispatch
def visibility(mask: Mask, rows: Ranges, columns: Ranges) -> np.ndarray:
  """int8 [n, m], EMPTY, PARTIAL or FULL, for n rows and m columns of tiles."""
  del mask
  return np.full((len(rows), len(columns)), PARTIAL, np.int8)


def _unknown(rows, columns):
  return visibility.dispatch(object)(None, rows, columns)


def _as_visibility(all_visible, none_visible):
  return np.where(
    none_visible, EMPTY, np.where(all_visible, FULL, PARTIAL)
  ).astype(np.int8)


def _known(*parameters: Any) -> bool:
  return not any(isinstance(each, jax.core.Tracer) for each in parameters)


@visibility.register
def _(mask: Band, rows: Ranges, columns: Ranges):
  if not _known(mask.left, mask.right):
    return _unknown(rows, columns)
  nearest = columns.first[None, :] - rows.last[:, None]
  farthest = columns.last[None, :] - rows.first[:, None]
  all_visible = np.ones(nearest.shape, bool)
  none_visible = ~all_visible
  if mask.left is not None:
    left = np.asarray(mask.left, np.int64)
    all_visible &= nearest >= -left.min()
    none_visible |= farthest < -left.max()
  if mask.right is not None:
    right = np.asarray(mask.right, np.int64)
    all_visible &= farthest <= right.min()
    none_visible |= nearest > right.max()
  return _as_visibility(all_visible, none_visible)


@visibility.register
def _(mask: Below, rows: Ranges, columns: Ranges):
  if not _known(mask.limit):
    return _unknown(rows, columns)
  limit = np.asarray(mask.limit, np.int64)
  tiles = _as_visibility(
    columns.last < limit.min(), columns.first >= limit.max()
  )
  return np.broadcast_to(tiles, (len(rows), len(columns)))


@visibility.register
def _(mask: Segments, rows: Ranges, columns: Ranges):
  if not (
    _known(mask.query_ids, mask.key_ids)
    and _inside(rows, np.shape(mask.query_ids)[-1])
    and _inside(columns, np.shape(mask.key_ids)[-1])
  ):
    return _unknown(rows, columns)
  query_low, query_high = _extremes(mask.query_ids, rows)
  key_low, key_high = _extremes(mask.key_ids, columns)
  query_low, query_high = query_low[..., :, None], query_high[..., :, None]
  key_low, key_high = key_low[..., None, :], key_high[..., None, :]
  apart = (query_high < key_low) | (query_low > key_high)
  alike = (query_low == query_high) & (key_low == key_high)
  alike &= query_low == key_low
  return np.broadcast_to(
    _as_visibility(_over_leading(np.all, alike), _over_leading(np.all, apart)),
    (len(rows), len(columns)),
  )


@visibility.register
def _(mask: ArrayMask, rows: Ranges, columns: Ranges):
  if not _known(mask.array):
    return _unknown(rows, columns)
  every = some = np.atleast_2d(np.asarray(mask.array))
  if not all(map(_inside, (rows, columns), every.shape[-2:])):
    return _unknown(rows, columns)
  for axis, ranges in ((-2, rows), (-1, columns)):
    if every.shape[axis] > 1:
      every = np.logical_and.reduceat(every, ranges.first, axis=axis)
      some = np.logical_or.reduceat(some, ranges.first, axis=axis)
  return np.broadcast_to(
    _as_visibility(_over_leading(np.all, every), ~_over_leading(np.any, some)),
    (len(rows), len(columns)),
  )


@visibility.register
def _(mask: Combined, rows: Ranges, columns: Ranges):
  combine = np.minimum if mask.operation == "and" else np.maximum
  return combine(
    visibility(mask.left, rows, columns), visibility(mask.right, rows, columns)
  )


@visibility.register
def _(mask: MaskView, rows: Ranges, columns: Ranges):
  change = mask.transform
  if isinstance(change, Invert):
    return FULL - visibility(mask.inner, rows, columns)
  if isinstance(change, Shift):
    if not _known(change.row) or change.column is not None:
      return _unknown(rows, columns)
    offset = int(change.row)
    rows = Ranges(rows.first + offset, rows.last + offset)
  return visibility(mask.inner, rows, columns)


def _inside(ranges: Ranges, length: int) -> bool:
  """Whether an axis has all these positions; an axis of size 1 broadcasts."""
  return length == 1 or (ranges.first[0] >= 0 and ranges.last[-1] < length)


def _extremes(ids, ranges: Ranges):
  """The lowest and the highest id in each range, [..., ranges]."""
  ids = np.asarray(ids)
  if ids.shape[-1] == 1:
    return ids, ids
  return (
    np.minimum.reduceat(ids, ranges.first, axis=-1),
    np.maximum.reduceat(ids, ranges.first, axis=-1),
  )


def _over_leading(reduce, tiles):
  return reduce(tiles.reshape(-1, *tiles.shape[-2:]), axis=0)
