"""Values for pairs of positions, computed block by block.

Masks and biases are such values. They are asked for a block of rows and
columns at a time, so that no [T, S] array need ever exist.
"""

# Overrides keep the docstrings of what they override.
# ruff: noqa: D102

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.equality import EqualByValue

# What a mask says of a tile: nobody sees anybody, some do, all do.
EMPTY, PARTIAL, FULL = 0, 1, 2


class Pairwise(EqualByValue):
  """A value for every (query position, key position): a mask or a bias."""

  # NumPy then leaves `array & mask` to the mask.
  __array_ufunc__ = None

  def __bool__(self):
    raise TypeError(
      f"a {type(self).__name__} is neither true nor false: masks combine with"
      " &, | and ~, not with and, or and not; compare with None by `is`"
    )

  @property
  def leading_rank(self) -> int:
    """The number of leading axes that the parameters need."""
    return 0

  def block(self, rows: Any, columns: Any, rank: int) -> jax.Array:
    """The values at some query positions and some key positions.

    Args:
      rows: int32 [t], positions of queries.
      columns: int32 [s], positions of keys.
      rank: the number of leading axes of the scores, 2 for [B, H, T, S].

    Returns:
      An array that broadcasts to [leading..., t, s].
    """
    raise NotImplementedError(f"{type(self).__name__} must define block")

  def check(self, query_length: int | None, key_length: int) -> None:
    """Raises ValueError if the parameters do not fit these lengths."""

  def materialize(self, query_length: int, key_length: int) -> jax.Array:
    """All values at once.

    Args:
      query_length: T.
      key_length: S.

    Returns:
      [..., T, S] with the leading axes that the parameters have.
    """
    self.check(query_length, key_length)
    rows, columns = positions(query_length), positions(key_length)
    block = axes.with_rank(self.block(rows, columns, self.leading_rank), 2)
    shape = (*block.shape[:-2], query_length, key_length)
    return jnp.broadcast_to(block, shape)


def positions(length: int) -> np.ndarray | jax.Array:
  """The positions 0 ... length - 1, known when tracing if the length is."""
  known = isinstance(length, int)
  return (np if known else jnp).arange(length, dtype=np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class TilePositions:
  """The positions of a tile, whose number is a multiple of the tile's size.

  It can be used like the array of them, and knows that they are consecutive.
  """

  start: jax.Array
  size: int

  def __getitem__(self, index):
    return self.array[index]

  def __add__(self, offset):
    return self.array + offset

  @property
  def array(self) -> jax.Array:
    """int32 [size]."""
    return self.start + jnp.arange(self.size, dtype=jnp.int32)


def taken(array: jax.Array, index: Any, axis: int) -> jax.Array:
  """`array` at `index` along `axis`; an axis of size 1 or none is left alone.

  Indices past the end read the last entry: a tile may reach over the edge.
  """
  if array.ndim < -axis or array.shape[axis] == 1:
    return array
  if isinstance(index, TilePositions):
    if array.shape[axis] % index.size == 0:
      return jax.lax.dynamic_slice_in_dim(
        array, index.start, index.size, axis=axis
      )
    index = index.array
  if isinstance(index, np.ndarray):
    # Known positions in one piece need no gather, whose gradient is slow.
    start, stop = (index[0], index[-1] + 1) if index.size else (0, 0)
    if start >= 0 and stop <= array.shape[axis] and (np.diff(index) == 1).all():
      return jax.lax.slice_in_dim(array, int(start), int(stop), axis=axis)
  return jnp.take(array, index, axis=axis, mode="clip")


def checked_length(name: str, shape, axis: int, length: int | None) -> None:
  """Raises ValueError unless an axis is absent, 1 or `length` (None: any)."""
  if len(shape) < -axis or length is None or shape[axis] in (1, length):
    return
  raise ValueError(
    f"{name} of shape {tuple(shape)} does not broadcast: its axis {axis} must "
    f"be 1 or {length}"
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Shifted(Pairwise):
  """Values for queries whose first one stands at position `offset`."""

  inner: Pairwise
  offset: int | jax.Array

  @property
  def leading_rank(self):
    return self.inner.leading_rank

  def block(self, rows, columns, rank):
    offset = self.offset
    if isinstance(offset, int):
      # Sums of positions must not leave their 32 bits.
      offset = max(-(2**30), min(offset, 2**30))
    return self.inner.block(rows + offset, columns, rank)

  def check(self, query_length, key_length):
    self.inner.check(None, key_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedPairs(Pairwise):
  """Values with heads as [H], for scores with heads as [K, G]."""

  inner: Pairwise
  num_key_value_heads: int = dataclasses.field(metadata={"static": True})
  num_groups: int = dataclasses.field(metadata={"static": True})

  @property
  def leading_rank(self):
    rank = self.inner.leading_rank
    return rank + 1 if rank else 0

  def block(self, rows, columns, rank):
    block = self.inner.block(rows, columns, rank - 1)
    if block.ndim < 3:
      return block
    heads = self.num_key_value_heads * self.num_groups
    checked_length("mask or bias", block.shape, -3, heads)
    return axes.split_axis(block, -3, self.num_key_value_heads, self.num_groups)

  def check(self, query_length, key_length):
    self.inner.check(query_length, key_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PairsOfHeads(Pairwise):
  """Values of `count` heads from the `first` on; all `total` are at `axis`."""

  inner: Pairwise
  first: jax.Array
  count: int = dataclasses.field(metadata={"static": True})
  total: int = dataclasses.field(metadata={"static": True})
  axis: int = dataclasses.field(metadata={"static": True})

  @property
  def leading_rank(self):
    return self.inner.leading_rank

  def block(self, rows, columns, rank):
    block = self.inner.block(rows, columns, rank)
    if block.ndim < -self.axis or block.shape[self.axis] == 1:
      return block
    checked_length("mask or bias", block.shape, self.axis, self.total)
    return jax.lax.dynamic_slice_in_dim(
      block, self.first, self.count, axis=self.axis
    )

  def check(self, query_length, key_length):
    self.inner.check(query_length, key_length)
