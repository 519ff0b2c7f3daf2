"""Base classes of masks and biases, evaluated by blocks of positions."""

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.equality import EqualByValue
from attention.positional.pair_block import PairBlock
from attention.positional.position_arrays import (
  checked_length,
  checked_offset,
  positions,
  positions_array,
  taken,
)

# The visibility of a tile: a mask hides all pairs, some of them, or none.
EMPTY, PARTIAL, FULL = 0, 1, 2


class Pairwise(EqualByValue):
  """A value for every (query position, key position): a mask or a bias."""

  # NumPy then calls `mask.__rand__` for `array & mask`.
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
    """The values for rows, int32 [t], and columns, int32 [s].

    They broadcast to [leading..., t, s]; `rank` is the number of leading axes
    of the scores, 2 for [B, H, T, S].
    """
    return self.values(PairBlock(rows, columns, rank))

  def values(self, at: Any) -> jax.Array:
    """The values at a `PairBlock`, or at a tile of a kernel."""
    if type(self).block is Pairwise.block:
      raise NotImplementedError(f"{type(self).__name__} must define block")
    return at.of_block(self)

  def check(self, query_length: int | None, key_length: int | None) -> None:
    """Raises ValueError if the parameters do not fit these lengths."""

  def materialize(self, query_length: int, key_length: int) -> jax.Array:
    """All values, [..., T, S], with the leading axes of the parameters."""
    self.check(query_length, key_length)
    rows, columns = positions(query_length), positions(key_length)
    block = axes.with_rank(self.block(rows, columns, self.leading_rank), 2)
    shape = (*block.shape[:-2], query_length, key_length)
    return jnp.broadcast_to(block, shape)

  def shifted(self, offset: int | jax.Array) -> Self:
    """The mask or bias for queries that start at position `offset`.

    The offset is one integer, which may be traced; otherwise a ValueError is
    raised.
    """
    return self.placed(checked_offset(offset))

  def placed(
    self, row: int | jax.Array, column: jax.Array | None = None
  ) -> Self:
    """The values for queries that start at `row` and keys at `column`."""
    return self._view(Shift(row, column))

  def at(self, rows: jax.Array, columns: jax.Array | None = None) -> Self:
    """The values for queries at positions `rows` and keys at `columns`.

    Positions are int32 [T] and [S], or [..., T] and [..., S] with the same
    leading axes, which are the leftmost of the scores. None means 0 to S - 1.
    """
    rows = positions_array("rows", rows)
    if columns is not None:
      columns = positions_array("columns", columns)
      if rows.shape[:-1] != columns.shape[:-1]:
        raise ValueError(
          "rows and columns must have the same leading axes, got shapes "
          f"{rows.shape} and {columns.shape}"
        )
    return self._view(AtPositions(rows, columns))

  def grouped(self, num_key_value_heads: int, num_groups: int) -> Self:
    """The values for heads with axes [K, G] instead of [H]."""
    return self._view(GroupHeads(num_key_value_heads, num_groups))

  def of_heads(self, first: jax.Array, count: int, total: int) -> Self:
    """The values of heads `first` to `first + count - 1` of `total`."""
    return self._view(SelectHeads(first, count, total))

  def _view(self, transform: "Transform") -> Self:
    raise NotImplementedError(f"{type(self).__name__} must define _view")


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayValues(Pairwise):
  """array[..., i, j]; axes of size 1 broadcast."""

  name: ClassVar[str]
  array: jax.Array

  @property
  def leading_rank(self):
    return max(self.array.ndim - 2, 0)

  def values(self, at):
    return at.of_array(self)

  def check(self, query_length, key_length):
    checked_length(self.name, self.array.shape, -2, query_length)
    checked_length(self.name, self.array.shape, -1, key_length)


@dataclasses.dataclass(frozen=True, eq=False)
class Combination(Pairwise):
  """Two masks or two biases, combined."""

  left: Any
  right: Any

  @property
  def leading_rank(self):
    return max(self.left.leading_rank, self.right.leading_rank)

  def check(self, query_length, key_length):
    self.left.check(query_length, key_length)
    self.right.check(query_length, key_length)


class Transform(EqualByValue):
  """Changes which positions or heads of a `Pairwise` are evaluated."""

  def leading_rank(self, rank: int) -> int:
    """The leading rank of the result, for that of the argument."""
    return rank

  def values(self, inner: Pairwise, at: Any) -> jax.Array:
    """See `Pairwise.values`."""
    return at.of_transform(self, inner)

  def block(self, inner: Pairwise, rows, columns, rank: int) -> jax.Array:
    """See `Pairwise.block`."""
    raise NotImplementedError

  def check(self, inner: Pairwise, query_length, key_length) -> None:
    """See `Pairwise.check`."""
    inner.check(query_length, key_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Shift(Transform):
  """Adds `row` to the queries' positions and `column` to the keys'."""

  row: int | jax.Array
  column: jax.Array | None

  def moved(self, rows: Any, columns: Any) -> tuple[Any, Any]:
    """The positions at which `inner` is evaluated."""
    if self.column is not None:
      columns = columns + self.column
    return rows + self.row, columns

  def values(self, inner, at):
    return inner.values(at.shifted(self))

  def check(self, inner, query_length, key_length):
    inner.check(None, key_length if self.column is None else None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AtPositions(Transform):
  """Takes the positions of queries and keys from arrays [..., T], [..., S]."""

  rows: jax.Array
  columns: jax.Array | None

  def leading_rank(self, rank):
    return rank + self.rows.ndim - 1

  def block(self, inner, rows, columns, rank):
    rows = taken(self.rows, rows, -1)
    moved = None if self.columns is None else taken(self.columns, columns, -1)

    def of_example(index, rows, moved):
      own = columns if moved is None else moved
      block = inner.block(rows, own, rank)
      if index:
        block = axes.with_rank(block, rank + 2)
      for number in index:
        number = 0 if block.shape[0] == 1 else number
        block = jax.lax.dynamic_index_in_dim(block, number, keepdims=False)
      return block

    for _ in rows.shape[:-1]:
      of_example = jax.vmap(of_example)
    return of_example(axes.indices(rows.shape[:-1]), rows, moved)

  def check(self, inner, query_length, key_length):
    checked_length("rows", self.rows.shape, -1, query_length)
    if self.columns is not None:
      checked_length("columns", self.columns.shape, -1, key_length)
      key_length = None
    inner.check(None, key_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupHeads(Transform):
  """Splits the axis of heads, [H], into [K, G]."""

  num_key_value_heads: int = dataclasses.field(metadata={"static": True})
  num_groups: int = dataclasses.field(metadata={"static": True})

  def leading_rank(self, rank):
    return rank + 1 if rank else 0

  def block(self, inner, rows, columns, rank):
    block = inner.block(rows, columns, rank - 1)
    if block.ndim < 3:
      return block
    heads = self.num_key_value_heads * self.num_groups
    checked_length("mask or bias", block.shape, -3, heads)
    return axes.split_axis(block, -3, self.num_key_value_heads, self.num_groups)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SelectHeads(Transform):
  """Selects `count` of `total` heads, from the `first` on."""

  first: jax.Array
  count: int = dataclasses.field(metadata={"static": True})
  total: int = dataclasses.field(metadata={"static": True})

  def block(self, inner, rows, columns, rank):
    block = inner.block(rows, columns, rank)
    if block.ndim < 3 or block.shape[-3] == 1:
      return block
    checked_length("mask or bias", block.shape, -3, self.total)
    return jax.lax.dynamic_slice_in_dim(block, self.first, self.count, axis=-3)


@dataclasses.dataclass(frozen=True, eq=False)
class View(Pairwise):
  """The values of `inner`, as changed by `transform`."""

  inner: Any
  transform: Transform

  @property
  def leading_rank(self):
    return self.transform.leading_rank(self.inner.leading_rank)

  def values(self, at):
    return self.transform.values(self.inner, at)

  def check(self, query_length, key_length):
    self.transform.check(self.inner, query_length, key_length)
