"""Arrays that a kernel reads besides tokens: of scores, masks and biases.

The functions of a tile read parts of arrays from a `Source`. While they are
traced it is a `Recorder`, which records these arrays as operands. In a kernel
it is `Blocks`, which returns the blocks of a tile in the same order.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp


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


class Source(Protocol):
  """What supplies the parts of arrays, for arrays with leading axes."""

  def read(
    self,
    array: Any,
    kind: Kind,
    axes: Sequence[int | None],
    origin: Any = None,
  ) -> jax.Array:
    """The part of an array, a reshape of `origin`, that belongs to a tile."""


class Recorder:
  """Records the operands, and returns the zeros of a tile of one pair."""

  def __init__(self) -> None:
    self.operands: list[Operand] = []

  def read(self, array, kind, axes, origin=None):
    """Zeros."""
    array = jnp.asarray(array)
    operand = Operand(array, kind, tuple(axes), origin)
    self.operands.append(operand)
    return jnp.zeros(operand.part(1, 1), array.dtype)


def recorded(function: Callable[..., Any], rank: int) -> list[Operand]:
  """The arrays that a function of pairs reads.

  It is (source, queries [t, 1], keys [1, s], indices of leading axes) -> array.
  """
  recorder, one = Recorder(), jnp.zeros((1, 1), jnp.int32)
  function(recorder, one, one, [0] * rank)
  return recorder.operands


class Blocks:
  """Returns blocks, in the order in which a `Recorder` recorded them."""

  def __init__(self, blocks: Sequence[jax.Array]):
    self._blocks = iter(blocks)

  def read(self, array, kind, axes, origin=None):
    """The next block."""
    del array, kind, axes, origin
    return next(self._blocks)


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
    widths = [(0, 0)] * (gradient.ndim - 1) + [(0, missing)]
    return jnp.pad(gradient, widths)
  first, last = jnp.split(gradient, [length - 1], axis=-1)
  last = jnp.sum(last, axis=-1, keepdims=True)
  return jnp.concatenate([first, last], axis=-1)
