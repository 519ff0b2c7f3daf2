"""Where a tile of pairs lies, and what it reads of masks and biases.

A tile reads the parts of arrays from a `Source`, so that it loads only the
blocks that belong to it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.implementations.pallas.dropout import factors
from attention.implementations.pallas.look_up import by_distance
from attention.implementations.pallas.operands import (
  Kind,
  OfPairs,
  Operand,
  Source,
  Unsupported,
  aligned_left,
  aligned_right,
)
from attention.masks.types import Below
from attention.positional.base import (
  AtPositions,
  GroupHeads,
  Pairwise,
  SelectHeads,
  Shift,
  Transform,
)
from attention.request import Request

# By whether an array has a number for each query, and for each key.
_KINDS = {
  (True, True): Kind.TILE,
  (True, False): Kind.COLUMN,
  (False, True): Kind.ROW,
  (False, False): Kind.SCALAR,
}


def of_request(
  request: Request, key_tile: int, tile_type: type["Tile"]
) -> tuple[OfPairs | None, OfPairs | None, OfPairs | None]:
  """The bias, the mask and the factors of dropout, in tiles of so many keys."""
  rank, (*_, length, key_length) = len(request.leading), request.scores_shape

  def conjunction(*pairs):
    parts = [each for each in pairs if each is not None]

    def of_pairs(source, queries, keys, indices):
      del indices
      lengths = length, key_length
      at = tile_type(source, queries, keys, rank, lengths)
      return functools.reduce(
        jnp.logical_and, [each.values(at) for each in parts]
      )

    return of_pairs if parts else None

  inside = Below(key_length) if key_length % key_tile else None
  return (
    conjunction(request.bias),
    conjunction(request.mask, inside),
    None if request.dropout is None else factors(request.dropout, request),
  )


@dataclasses.dataclass(frozen=True)
class Tile:
  """Where a tile lies, and what supplies its arrays.

  See `PairBlock`, in whose place masks and biases are evaluated at it.
  """

  source: Source
  # The positions at which a mask or bias is evaluated, [t, 1] and [1, s].
  queries: jax.Array
  keys: jax.Array
  rank: int
  lengths: tuple[int, int] | None  # (T, S); None at positions from arrays
  # What shifts have added to the positions of queries and of keys.
  shifts: tuple[Any, Any] = (0, 0)
  # (K, G) where two axes of the context are one axis of the arrays.
  grouping: tuple[int, int] | None = None
  heads: SelectHeads | None = None  # of the arrays, if not all

  def leftmost(self, parameter: Any) -> Any:
    """A parameter [B...] that belongs to the leftmost leading axes."""
    if isinstance(parameter, int):
      return parameter
    leading = jnp.shape(parameter)
    rank = self.rank - (self.grouping is not None)
    if len(leading) == rank:
      return self.of_heads(parameter)
    return self._number(parameter, aligned_left(leading))

  def of_heads(self, parameter: Any) -> Any:
    """A parameter [...,  H] that belongs to the rightmost leading axes."""
    if isinstance(parameter, int | float):
      return parameter
    array = jnp.asarray(parameter)
    return self._read_of_heads(array, array.ndim, Kind.SCALAR)

  def of_array(self, pairs: Any) -> jax.Array:
    """The tile of an array [..., T, S] that broadcasts."""
    self._require_places(pairs)
    whole = jnp.asarray(pairs.array)
    array = whole.reshape((1,) * (2 - whole.ndim) + whole.shape)
    moved = self._moved(self._moved(array, -2, of_keys=False), -1, of_keys=True)
    origin = self._origin(whole) if moved is array else None
    if array.dtype == jnp.bool_:
      moved = moved.astype(jnp.int8)
    array, axes = self._split(moved, moved.ndim - 2)
    queries, keys = array.shape[-2:]
    kind = _KINDS[queries > 1, keys > 1]
    core = [size for size in (queries, keys) if size > 1]
    array = array.reshape(*array.shape[:-2], *core)
    found = self.source(Operand(array, kind, axes, origin))
    return found != 0 if whole.dtype == jnp.bool_ else found

  def of_tokens(self, mask: Any) -> tuple[jax.Array, jax.Array]:
    """The segments of queries [t, 1] and of keys [1, s]."""
    self._require_places(mask)
    query_ids = self._moved(jnp.asarray(mask.query_ids), -1, of_keys=False)
    key_ids = self._moved(jnp.asarray(mask.key_ids), -1, of_keys=True)
    return self._tokens(query_ids, Kind.COLUMN), self._tokens(key_ids, Kind.ROW)

  def of_distances(self, bias: Any) -> jax.Array:
    """The numbers of a bias by distance or by bucket."""
    numbers = self._read_of_heads(bias.numbers, 1, Kind.WHOLE)
    return self.by_distance(numbers, bias.max_distance, bias.buckets)

  def of_function(self, function: Callable) -> jax.Array:
    """The values of a function of `masks.where`."""
    visible = function(self.queries, self.keys)
    if jnp.result_type(visible) != jnp.bool_ or jnp.ndim(visible) != 2:
      raise Unsupported(
        "supports functions of masks.where that return booleans [t, s], got "
        f"{jnp.result_type(visible)} of shape {jnp.shape(visible)}"
      )
    return visible

  def of_block(self, pairs: Pairwise) -> jax.Array:
    """Raises, as kernels cannot read parts of the arrays of a `block`."""
    raise Unsupported(
      f"does not support {type(pairs).__name__} as a mask or a bias"
    )

  def shifted(self, shift: Shift) -> "Tile":
    """The same pairs at shifted positions."""
    queries, keys = self.queries, self.keys
    row_shift, column_shift = self.shifts
    if not _is_zero(shift.row):
      queries = queries + self._number(shift.row, ())
      row_shift = row_shift + shift.row
    if shift.column is not None:
      keys = keys + self._number(shift.column, ())
      column_shift = column_shift + shift.column
    shifts = row_shift, column_shift
    return dataclasses.replace(self, queries=queries, keys=keys, shifts=shifts)

  def of_transform(self, change: Transform, inner: Pairwise) -> jax.Array:
    """The values of a mask or bias that a transform changes."""
    if isinstance(change, AtPositions):
      self._require_places(inner, are_own=True)
      queries, keys = self._tokens(change.rows, Kind.COLUMN), self.keys
      if change.columns is not None:
        keys = self._tokens(change.columns, Kind.ROW)
      return inner.values(
        dataclasses.replace(self, queries=queries, keys=keys, lengths=None)
      )
    if isinstance(change, GroupHeads):
      heads = change.num_key_value_heads, change.num_groups
      return inner.values(dataclasses.replace(self, grouping=heads))
    if isinstance(change, SelectHeads):
      return inner.values(dataclasses.replace(self, heads=change))
    raise Unsupported(f"does not support {type(change).__name__} of a mask")

  def by_distance(
    self, numbers: jax.Array, max_distance: int, buckets: np.ndarray | None
  ) -> jax.Array:
    """numbers[place] of all pairs, or numbers[buckets[place]].

    A pair's place is clip(j - i, -m, m) + m.
    """
    if buckets is not None:
      numbers = _of_buckets(numbers, buckets)
    if self.lengths is None:
      raise Unsupported(
        "does not support biases by distance at given positions"
      )
    (queries, _), (_, keys) = self.queries.shape, self.keys.shape
    first = self.keys[0, 0] - self.queries[-1, 0] + max_distance
    numbers = jnp.broadcast_to(numbers, (queries, numbers.shape[-1]))
    return by_distance(keys, first, numbers)

  def _require_places(self, pairs: Any, *, are_own: bool = False) -> None:
    """Raises if positions are from arrays, or shifted and should not be."""
    is_shifted = not all(map(_is_zero, self.shifts))
    if self.lengths is None or (are_own and is_shifted):
      raise Unsupported(
        f"does not support {type(pairs).__name__} at shifted positions"
      )

  def _moved(self, array: jax.Array, axis: int, of_keys: bool) -> jax.Array:
    """An array whose entries along an axis are those of own positions."""
    shift = self.shifts[of_keys]
    if array.shape[axis] == 1 or _is_zero(shift):
      return array
    assert self.lengths is not None
    index = shift + jnp.arange(self.lengths[of_keys])
    return jnp.take(array, index, axis=axis, mode="clip")

  def _number(self, value: Any, axes) -> Any:
    """A number for each leading entry."""
    if isinstance(value, int | float):
      return value
    return self.source(Operand(jnp.asarray(value), Kind.SCALAR, axes))

  def _tokens(self, array: jax.Array, kind: Kind) -> jax.Array:
    """The part of an array [B..., n]."""
    return self.source(Operand(array, kind, aligned_left(array.shape[:-1])))

  def _read_of_heads(self, array: jax.Array, leading: int, kind: Kind) -> Any:
    """The part of an array [..., H, ...] that belongs to a head."""
    own, axes = self._split(array, leading)
    return self.source(Operand(own, kind, axes, self._origin(array)))

  def _origin(self, array: jax.Array) -> jax.Array | None:
    """The array, if what `_split` returns is a reshape of it."""
    return array if self.heads is None else None

  def _split(
    self, array: jax.Array, leading: int
  ) -> tuple[jax.Array, tuple[int | None, ...]]:
    """An array whose axis of heads is like the context's, and its axes."""
    sizes = array.shape[:leading]
    if self.heads is not None and sizes and sizes[-1] > 1:
      first, count = self.heads.first, self.heads.count
      axis = leading - 1
      array = jax.lax.dynamic_slice_in_dim(array, first, count, axis=axis)
      sizes = array.shape[:leading]
    if self.grouping is not None and sizes:
      key_heads, groups = self.grouping
      heads = (1, 1) if sizes[-1] == 1 else (key_heads, groups)
      array = array.reshape(*sizes[:-1], *heads, *array.shape[leading:])
      sizes = array.shape[: leading + 1]
    return array, aligned_right(sizes, self.rank)


def _is_zero(shift: Any) -> bool:
  return isinstance(shift, int) and shift == 0


def _of_buckets(numbers: jax.Array, buckets: np.ndarray) -> jax.Array:
  """The numbers of distances, [1, 2m + 1], from those of buckets."""
  (count,) = numbers.shape
  # XLA would need several operations for the look-up, and for its transpose.
  rows, columns = (
    jax.lax.broadcasted_iota(jnp.int32, (count, count), n) for n in (0, 1)
  )
  column = _selected(rows == columns, numbers[None], axis=1)
  of_distances = jnp.asarray(buckets, jnp.int32)[None]
  rows = jax.lax.broadcasted_iota(jnp.int32, (count, buckets.size), 0)
  return _selected(rows == of_distances, column, axis=0)


def _selected(is_own, numbers, axis: int):
  """The one number of each row or column; the others may be infinite."""
  return jnp.sum(jnp.where(is_own, numbers, 0.0), axis=axis, keepdims=True)
