"""Where a tile of pairs lies, and what it reads of masks and biases.

A tile reads the parts of arrays from a `Source`, so that it loads only the
blocks that belong to it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.implementations.pallas.look_up import by_distance
from attention.implementations.pallas.operands import (
  Kind,
  Source,
  Unsupported,
  aligned_left,
  aligned_right,
)
from attention.positional import SelectHeads

# By whether an array has a number for each query, and for each key.
_KINDS = {
  (True, True): Kind.TILE,
  (True, False): Kind.COLUMN,
  (False, True): Kind.ROW,
  (False, False): Kind.SCALAR,
}


@dataclasses.dataclass(frozen=True)
class Tile:
  """Where a tile lies, and what supplies its arrays."""

  # `queries` [t, 1] and `keys` [1, s] are the positions at which a mask or bias
  # is evaluated, and `own_queries` and `own_keys` say whether they are those of
  # the tile itself.

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

  def by_bucket(self, numbers: jax.Array, buckets: np.ndarray) -> jax.Array:
    """numbers[buckets[clip(j - i, -m, m) + m]], from numbers of each bucket."""
    (count,) = numbers.shape
    # XLA would need several operations for the look-up, and for its transpose.
    rows, columns = (
      jax.lax.broadcasted_iota(jnp.int32, (count, count), n) for n in (0, 1)
    )
    column = _selected(rows == columns, numbers[None], axis=1)
    of_distances = jnp.asarray(buckets, jnp.int32)[None]
    rows = jax.lax.broadcasted_iota(jnp.int32, (count, buckets.size), 0)
    numbers = _selected(rows == of_distances, column, axis=0)
    return self.by_distance(numbers, buckets.size // 2)

  def require_places(self, pairs: Any) -> None:
    """Raises unless the entries of arrays at the positions are known."""
    if self.lengths is None:
      self.require_own(pairs)

  def require_own(self, pairs: Any) -> None:
    """Raises unless the positions are those of the tile itself."""
    if not (self.own_queries and self.own_keys):
      raise Unsupported(
        f"does not support {type(pairs).__name__} at shifted positions"
      )

  def left_aligned(self, parameter: Any) -> Any:
    """A parameter [B...] that belongs to the leftmost leading axes."""
    if isinstance(parameter, int):
      return parameter
    leading = jnp.shape(parameter)
    rank = self.rank - (self.grouping is not None)
    if len(leading) == rank:
      return self.of_heads(parameter)
    return self.number(parameter, aligned_left(leading))

  def of_heads(self, parameter: Any) -> Any:
    """A parameter [...,  H] that belongs to the rightmost leading axes."""
    if isinstance(parameter, int | float):
      return parameter
    array = jnp.asarray(parameter)
    own, axes = self._split(array, array.ndim)
    return self.source.read(own, Kind.SCALAR, axes, self._origin(array))

  def row_of_heads(self, numbers: jax.Array) -> jax.Array:
    """The numbers [n] of a head, from [H, n]."""
    own, axes = self._split(numbers, 1)
    return self.source.read(own, Kind.WHOLE, axes, self._origin(numbers))

  def of_array(self, pairs: Any) -> jax.Array:
    """The tile of an array [..., T, S] that broadcasts."""
    self.require_places(pairs)
    whole = jnp.asarray(pairs.array)
    array = whole.reshape((1,) * (2 - whole.ndim) + whole.shape)
    moved = self.moved(self.moved(array, -2, of_keys=False), -1, of_keys=True)
    origin = self._origin(whole) if moved is array else None
    if array.dtype == jnp.bool_:
      moved = moved.astype(jnp.int8)
    array, axes = self._split(moved, moved.ndim - 2)
    queries, keys = array.shape[-2:]
    kind = _KINDS[queries > 1, keys > 1]
    core = [size for size in (queries, keys) if size > 1]
    array = array.reshape(*array.shape[:-2], *core)
    return self.source.read(array, kind, axes, origin)

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


def _selected(is_own, numbers, axis: int):
  """The one number of each row or column; the others may be infinite."""
  return jnp.sum(jnp.where(is_own, numbers, 0.0), axis=axis, keepdims=True)
