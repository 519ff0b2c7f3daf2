"""The arrays of a score, as a kernel reads them for one head and tile."""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.arrays.head_parameters import declared
from attention.implementations.pallas.operands import (
  Kind,
  Operand,
  Unsupported,
  aligned_right,
)
from attention.request import Request
from attention.scores import Positions, Score


class Undeclared(Unsupported):
  """A score that is no function of one head."""

  def __init__(self) -> None:
    super().__init__(
      "needs a score of one head as a function of matrices [t, D] and [s, D], "
      "which returns [t, s]; a dataclass declares arrays of several heads by "
      "dataclasses.field(metadata=attention.scores.MATRIX), VECTOR or SCALAR"
    )


def parameters(
  score: Score, rank: int
) -> tuple[Callable[[Sequence[Any]], Score], list[Operand]]:
  """The score as a function of one head's arrays, and these as operands."""
  leaves, structure = jax.tree.flatten(score)
  declarations = declared(score)
  if declarations is None:
    return lambda parts: score, []
  operands: list[Operand] = []
  places: dict[int, Callable] = {}
  for place, (leaf, own) in enumerate(zip(leaves, declarations)):
    if not isinstance(leaf, jax.Array | np.ndarray):
      continue
    array = jnp.asarray(leaf)
    number = 0 if own.head_axis is None else own.head_axis + 1
    axes = aligned_right(leaf.shape[:number], rank)
    first, core = len(operands), leaf.shape[number:]
    if own.by_position:
      operands += [Operand(array, kind, axes) for kind in _BY_POSITION]
      places[place] = lambda parts, n=first: ByPosition(*parts[n : n + 2])
    else:
      kind = Kind.WHOLE if core else Kind.SCALAR
      operands.append(Operand(array, kind, axes))
      places[place] = operator.itemgetter(first)

  def with_parts(parts):
    own = list(leaves)
    for place, part_of in places.items():
      own[place] = part_of(parts)
    return jax.tree.unflatten(structure, own)

  return with_parts, operands


_BY_POSITION = (Kind.COLUMN, Kind.ROW)  # the fields of `ByPosition`


@dataclasses.dataclass(frozen=True)
class ByPosition:
  """The parts of numbers by position that belong to a tile."""

  of_queries: jax.Array
  of_keys: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class KernelPositions(Positions):
  """Positions of a tile, which has the parts of numbers by position."""

  own_starts: tuple[Any, Any] = (0, 0)  # those that no score has shifted

  def at_queries(self, numbers):
    """The numbers of the tile's queries, [t, 1]."""
    return self._parts(numbers).of_queries

  def at_keys(self, numbers):
    """The numbers of the tile's keys, [1, s]."""
    return self._parts(numbers).of_keys

  def _parts(self, numbers) -> ByPosition:
    starts = self.query_start, self.key_start
    if any(map(operator.is_not, starts, self.own_starts)):
      raise Unsupported("does not support arrays by position that are shifted")
    if not isinstance(numbers, ByPosition):
      raise Unsupported(
        "needs numbers by position in a field of the score that is declared by "
        "dataclasses.field(metadata=attention.scores.BY_POSITION)"
      )
    return numbers


def indices_of_scores(
  request: Request, indices: Sequence[Any]
) -> tuple[Any, ...]:
  """Indices of the context's leading axes, 0 for those that scores lack."""
  # Values may have more leading axes.
  sizes = request.scores_shape[:-2]
  missing = (1,) * (len(indices) - len(sizes))
  return tuple(
    0 if size == 1 else index
    for size, index in zip((*missing, *sizes), indices)
  )
