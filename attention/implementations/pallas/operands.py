"""Arrays that a kernel reads besides tokens: of scores, masks and biases.

The functions of a tile read parts of arrays from a `Source`. It first records
the arrays, as operands, and in a kernel returns the parts in the same order.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.implementations.blockwise.tiles import with_length


class Unsupported(NotImplementedError):
  """What a kernel does not support; completes "it ..."."""


class Kind(enum.Enum):
  """The part of an array that a tile reads."""

  SCALAR = "scalar"  # a number for each leading entry
  WHOLE = "whole"  # an array for each leading entry
  COLUMN = "column"  # a number for each query, [t, 1]
  ROW = "row"  # a number for each key, [1, s]
  TILE = "tile"  # a number for each pair, [t, s]


@dataclasses.dataclass(frozen=True, eq=False)
class Operand:
  """An array [leading..., core...]; its i-th leading axis is `axes[i]`."""

  # An entry of `axes` is an axis of the context, or None for one of size 1.

  array: jax.Array
  kind: Kind
  axes: tuple[int | None, ...]
  origin: jax.Array | None = None  # what the array is a reshape of

  def __post_init__(self):
    if self.origin is None:
      object.__setattr__(self, "origin", self.array)

  @property
  def core(self) -> tuple[int, ...]:
    """The shape without leading axes."""
    return self.array.shape[len(self.axes) :]

  def part(self, queries: int, keys: int) -> tuple[int, ...]:
    """The shape of the part that a tile reads."""
    return {
      Kind.SCALAR: (),
      Kind.WHOLE: self.core,
      Kind.COLUMN: (queries, 1),
      Kind.ROW: (1, keys),
      Kind.TILE: (queries, keys),
    }[self.kind]


# Returns the part of an array that belongs to a tile.
Source = Callable[[Operand], jax.Array]
# (source, queries [t, 1], keys [1, s], indices of the leading axes) -> numbers
# of pairs, [t, s] or less.
OfPairs = Callable[[Source, jax.Array, jax.Array, Sequence[Any]], jax.Array]


def with_operands(
  of_pairs: OfPairs, rank: int
) -> tuple[Callable[..., jax.Array], list[Operand]]:
  """A function (queries, keys, *indices, *parts), and its operands."""
  operands: list[Operand] = []

  def record(operand):
    operands.append(operand)
    return jnp.zeros(operand.part(1, 1), operand.array.dtype)

  def compute(queries, keys, *others):
    parts = iter(others[rank:])
    return of_pairs(lambda _: next(parts), queries, keys, others[:rank])

  one = jnp.zeros((1, 1), jnp.int32)
  of_pairs(record, one, one, [0] * rank)
  return compute, operands


def split(values: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
  """The first of `sizes` values, the next, and the rest."""
  parts = []
  for size in sizes:
    parts.append(values[:size])
    values = values[size:]
  return [*parts, values]


def aligned_right(leading: Sequence[int], rank: int) -> tuple[int | None, ...]:
  """The axes of an array's leading axes, by NumPy's rules."""
  first = rank - len(leading)
  return tuple(
    None if size == 1 else first + n for n, size in enumerate(leading)
  )


def aligned_left(leading: Sequence[int]) -> tuple[int | None, ...]:
  """The axes of an array's leading axes, the leftmost of the context's."""
  return tuple(None if size == 1 else n for n, size in enumerate(leading))


def of_parameter(array: Any, core: int, rank: int) -> Operand:
  """An array [leading..., core...] with so many core axes."""
  array = jnp.asarray(array)
  axes = aligned_right(array.shape[: array.ndim - core], rank)
  return Operand(array, Kind.WHOLE, axes)


def summed(
  gradient: jax.Array, operand: Operand, leading: Sequence[int]
) -> jax.Array:
  """[leading..., core...] summed to the shape of the operand's array."""
  if operand.kind in (Kind.COLUMN, Kind.ROW):
    gradient = _shortened(gradient, operand.core[0])
  elif operand.kind is Kind.TILE:
    # Pairs beyond the array are hidden, or those of queries without cotangents.
    queries, keys = operand.core
    gradient = gradient[..., :queries, :keys]
  axes = tuple(n for n in range(len(leading)) if n not in operand.axes)
  return jnp.sum(gradient, axis=axes).reshape(operand.array.shape)


def _shortened(gradient: jax.Array, length: int) -> jax.Array:
  """The transpose of `with_length` along the last axis."""
  missing = length - gradient.shape[-1]
  if missing >= 0:
    return with_length(gradient, length, "constant", axis=-1)
  first, last = jnp.split(gradient, [length - 1], axis=-1)
  last = jnp.sum(last, axis=-1, keepdims=True)
  return jnp.concatenate([first, last], axis=-1)
