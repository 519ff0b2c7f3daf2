"""What kernels for Hopper GPUs compute for each pair of a tile, traced.

Masks, biases, the factors of dropout, and what wrappers do to a score.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.implementations.pallas import dropout, pair_tile
from attention.implementations.pallas.hopper.tiles.layout import TILE
from attention.implementations.pallas.hopper.traced.bias_by_distance import (
  PairTile,
)
from attention.implementations.pallas.hopper.traced.pairs import (
  PairFunction,
  spread,
  traced,
)
from attention.implementations.pallas.operands import (
  OfPairs,
  Unsupported,
  with_operands,
)
from attention.implementations.pallas.score_parameters import (
  ByPosition,
  indices_of_scores,
  parameters,
  parts_by_position,
)
from attention.implementations.pallas.wrapped import (
  with_base,
  wrappers,
)
from attention.positional import Pairwise
from attention.request import Request
from attention.scores import Positions, Score
from attention.scores.base import Wrapper

_INTEGERS = jax.ShapeDtypeStruct(TILE, jnp.int32)
_INTEGER = jax.ShapeDtypeStruct((), jnp.int32)


def of_pairwise(
  name: str, parts: Sequence[Pairwise], request: Request
) -> PairFunction | None:
  """A bias, or the conjunction of masks: (queries, keys, *indices, *parts)."""
  if not parts:
    return None
  of_pairs = pair_tile.of_pairwise(parts, request, PairTile)
  return _of_source(name, of_pairs, len(request.leading))


def of_dropout(name: str, request: Request) -> PairFunction | None:
  """The factors of weights: (queries, keys, *indices, *parts)."""
  if request.dropout is None:
    return None
  factors = dropout.of_request(request.dropout, request)
  return _of_source(name, factors, len(request.leading))


def _of_source(name: str, of_pairs: OfPairs, rank: int) -> PairFunction:
  """A function that reads its arrays from a source."""
  compute, operands = with_operands(of_pairs, rank)
  arguments = [_INTEGERS, _INTEGERS, *[_INTEGER] * rank]
  return traced(
    name,
    lambda *own: [jnp.broadcast_to(compute(*own), TILE)],
    arguments,
    operands,
  )


def of_wrappers(
  name: str, request: Request, finish: Callable | None = None
) -> PairFunction | None:
  """What `finish` and then wrappers do to sums or products of pairs.

  A function of (scores, queries, keys, *indices, *parts).
  """
  score, rank = request.score, len(request.leading)
  own = [*wrappers(score)]
  if finish is None and all(
    type(each).pair_at is Wrapper.pair_at for each in own
  ):
    return None
  with_parts, operands = parameters(score, rank)

  def compute(scores, queries, keys, *others):
    indices, parts = indices_of_scores(request, others[:rank]), others[rank:]
    at = _PairPositions(
      *(0, 0, *TILE), key_length=0, leading=indices, queries=queries, keys=keys
    )
    scores = scores if finish is None else spread(finish(scores))
    changed = with_base(with_parts(parts), _Given(scores))
    both = changed, changed.denominator
    return [
      jnp.broadcast_to(each.pair_at(scores, scores, at), TILE)
      for each in both
      if each is not None
    ]

  floats = jax.ShapeDtypeStruct(TILE, jnp.float32)
  arguments = [floats, _INTEGERS, _INTEGERS, *[_INTEGER] * rank]
  try:
    return traced(name, compute, arguments, operands)
  except (AssertionError, RuntimeError, TypeError, ValueError) as error:
    if isinstance(error, Unsupported):
      raise
    raise Unsupported(
      "supports wrappers that change each score of a head by itself"
    ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class _Given(Score):
  """Scores that are known."""

  scores: jax.Array

  def pair_at(self, query, key, positions):
    return self.scores


@dataclasses.dataclass(frozen=True, eq=False)
class _PairPositions(Positions):
  """The positions of all pairs of a tile, relative to the starts."""

  queries: jax.Array = dataclasses.field(kw_only=True)
  keys: jax.Array = dataclasses.field(kw_only=True)

  @property
  def query(self):
    raise Unsupported("supports functions of the positions of pairs only")

  key = query

  def at_queries(self, numbers):
    return self._parts(numbers).of_queries

  def at_keys(self, numbers):
    return self._parts(numbers).of_keys

  def _parts(self, numbers) -> ByPosition:
    is_shifted = any(map(_is_shift, (self.query_start, self.key_start)))
    return parts_by_position(numbers, is_shifted=is_shifted)

  def broadcast(self, rank):
    return self.query_start + self.queries, self.key_start + self.keys


def _is_shift(start: Any) -> bool:
  return not isinstance(start, int) or start != 0
