"""What kernels for Hopper GPUs compute for each pair of a tile, traced.

Masks, biases, the factors of dropout, and what wrappers do to a score.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.implementations.pallas import pair_tile
from attention.implementations.pallas.hopper.tiles.layout import SIDE, TILE
from attention.implementations.pallas.hopper.traced.bias_by_distance import (
  PairTile,
)
from attention.implementations.pallas.hopper.traced.pairs import (
  PairFunction,
  spread,
  traced,
)
from attention.implementations.pallas.operands import Unsupported, with_operands
from attention.implementations.pallas.score_parameters import (
  KernelPositions,
  indices_of_scores,
  parameters,
)
from attention.implementations.pallas.wrapped import with_base, wrappers
from attention.request import Request
from attention.scores import Score
from attention.scores.base import Wrapper

_INTEGERS = jax.ShapeDtypeStruct(TILE, jnp.int32)
_INTEGER = jax.ShapeDtypeStruct((), jnp.int32)


def of_request(request: Request) -> list[PairFunction | None]:
  """The bias, the mask and the factors of dropout.

  Functions of (queries, keys, *indices, *parts).
  """
  rank = len(request.leading)
  arguments = [_INTEGERS, _INTEGERS, *[_INTEGER] * rank]

  def of_name(name, of_pairs):
    if of_pairs is None:
      return None
    compute, operands = with_operands(of_pairs, rank)

    def of_tile(*own):
      return [jnp.broadcast_to(compute(*own), TILE)]

    return traced(name, of_tile, arguments, operands)

  names = "bias", "mask", "dropout"
  return [*map(of_name, names, pair_tile.of_request(request, SIDE, PairTile))]


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
class _PairPositions(KernelPositions):
  """The positions of all pairs of a tile, relative to the starts."""

  queries: jax.Array = dataclasses.field(kw_only=True)
  keys: jax.Array = dataclasses.field(kw_only=True)

  @property
  def query(self):
    raise Unsupported("supports functions of the positions of pairs only")

  key = query

  def broadcast(self, rank):
    return self.query_start + self.queries, self.key_start + self.keys
