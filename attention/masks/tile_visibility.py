"""What a mask says of whole tiles, as far as it is known when tracing.

FULL and EMPTY are promises: every pair of the tile is seen, or none is, in
every batch entry and head. PARTIAL promises nothing, and is the answer wherever
a parameter is traced.
"""

import functools
from typing import Any

import jax
import numpy as np

from attention.masks.types import (
  ArrayMask,
  Band,
  Below,
  Combined,
  GroupedMask,
  Inverted,
  Mask,
  MaskOfHeads,
  Segments,
  ShiftedMask,
)
from attention.positional import EMPTY, FULL, PARTIAL


class Ranges:
  """Consecutive stretches of positions: where each begins and its last one."""

  def __init__(self, first: np.ndarray, last: np.ndarray):
    self.first, self.last = first, last

  @classmethod
  def cut(cls, length: int, size: int) -> "Ranges":
    """Stretches of `size` positions, the last one as long as it may be."""
    first = np.arange(0, length, size, dtype=np.int64)
    return cls(first, np.minimum(first + size, length) - 1)

  def __len__(self):
    return len(self.first)

  def shifted(self, offset: int) -> "Ranges":
    """The same stretches, `offset` positions later."""
    return Ranges(self.first + offset, self.last + offset)


@functools.singledispatch
def visibility(mask: Mask, rows: Ranges, columns: Ranges) -> np.ndarray:
  """EMPTY, PARTIAL or FULL for every tile.

  Args:
    mask: any mask.
    rows: positions of the queries of n tiles.
    columns: positions of the keys of m tiles.

  Returns:
    int8 [n, m].

  Example:
    >>> from attention import masks
    >>> visibility(masks.causal(), Ranges.cut(6, 2), Ranges.cut(6, 2))
    array([[1, 0, 0],
           [2, 1, 0],
           [2, 2, 1]], dtype=int8)
  """
  del mask
  return np.full((len(rows), len(columns)), PARTIAL, np.int8)


def _unknown(rows, columns):
  return visibility.dispatch(object)(None, rows, columns)


def _answer(everybody, nobody):
  return np.where(nobody, EMPTY, np.where(everybody, FULL, PARTIAL)).astype(
    np.int8
  )


def _known(*parameters: Any) -> bool:
  return not any(isinstance(each, jax.core.Tracer) for each in parameters)


@visibility.register
def _(mask: Band, rows: Ranges, columns: Ranges):
  if not _known(mask.left, mask.right):
    return _unknown(rows, columns)
  nearest = columns.first[None, :] - rows.last[:, None]
  farthest = columns.last[None, :] - rows.first[:, None]
  everybody = np.ones(nearest.shape, bool)
  nobody = ~everybody
  if mask.left is not None:
    left = np.asarray(mask.left, np.int64)
    everybody &= nearest >= -left.min()
    nobody |= farthest < -left.max()
  if mask.right is not None:
    right = np.asarray(mask.right, np.int64)
    everybody &= farthest <= right.min()
    nobody |= nearest > right.max()
  return _answer(everybody, nobody)


@visibility.register
def _(mask: Below, rows: Ranges, columns: Ranges):
  if not _known(mask.limit):
    return _unknown(rows, columns)
  limit = np.asarray(mask.limit, np.int64)
  seen = _answer(columns.last < limit.min(), columns.first >= limit.max())
  return np.broadcast_to(seen, (len(rows), len(columns)))


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
    _answer(_over_leading(np.all, alike), _over_leading(np.all, apart)),
    (len(rows), len(columns)),
  )


@visibility.register
def _(mask: ArrayMask, rows: Ranges, columns: Ranges):
  if not _known(mask.array):
    return _unknown(rows, columns)
  everybody = nobody = np.atleast_2d(np.asarray(mask.array))
  if not all(map(_inside, (rows, columns), everybody.shape[-2:])):
    return _unknown(rows, columns)
  for axis, ranges in ((-2, rows), (-1, columns)):
    if everybody.shape[axis] > 1:
      everybody = np.logical_and.reduceat(everybody, ranges.first, axis=axis)
      nobody = np.logical_or.reduceat(nobody, ranges.first, axis=axis)
  return np.broadcast_to(
    _answer(_over_leading(np.all, everybody), ~_over_leading(np.any, nobody)),
    (len(rows), len(columns)),
  )


@visibility.register
def _(mask: Combined, rows: Ranges, columns: Ranges):
  combine = np.minimum if mask.operation == "and" else np.maximum
  return combine(
    visibility(mask.left, rows, columns), visibility(mask.right, rows, columns)
  )


@visibility.register
def _(mask: Inverted, rows: Ranges, columns: Ranges):
  return FULL - visibility(mask.inner, rows, columns)


@visibility.register
def _(mask: ShiftedMask, rows: Ranges, columns: Ranges):
  if not _known(mask.offset) or np.ndim(mask.offset):
    return _unknown(rows, columns)
  return visibility(mask.inner, rows.shifted(int(mask.offset)), columns)


@visibility.register(GroupedMask)
@visibility.register(MaskOfHeads)
def _(mask, rows: Ranges, columns: Ranges):
  return visibility(mask.inner, rows, columns)


def _inside(ranges: Ranges, length: int) -> bool:
  """Whether an axis knows all these positions; one entry stands for all."""
  return length == 1 or (ranges.first[0] >= 0 and ranges.last[-1] < length)


def _extremes(ids, ranges: Ranges):
  """The lowest and the highest number of each stretch, [..., stretches]."""
  ids = np.asarray(ids)
  if ids.shape[-1] == 1:
    return ids, ids
  return (
    np.minimum.reduceat(ids, ranges.first, axis=-1),
    np.maximum.reduceat(ids, ranges.first, axis=-1),
  )


def _over_leading(reduce, tiles):
  return reduce(tiles.reshape(-1, *tiles.shape[-2:]), axis=0)
