"""The functions of a tile that kernels for TPUs evaluate, from a request."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.pallas.evaluation import Rules
from attention.implementations.pallas.functions import (
  TileFunction,
  check_supported,
  traced,
)
from attention.implementations.pallas.look_up import by_distance
from attention.implementations.pallas.operands import (
  OfPairs,
  Operand,
  Unsupported,
  split,
  with_operands,
)
from attention.implementations.pallas.pair_tile import Tile, of_request
from attention.implementations.pallas.score_parameters import (
  KernelPositions,
  Undeclared,
  indices_of_scores,
  parameters,
)
from attention.implementations.pallas.tpu.tokens import indices
from attention.normalizers import OnlineNormalizer
from attention.request import Request

_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)


class TileFunctions(NamedTuple):
  """The functions of a tile; None where there is none."""

  pair: TileFunction  # (query, key, first query, first key, *indices)
  bias: TileFunction | None  # (first query, first key, *indices)
  visible: TileFunction | None
  multiplier: TileFunction | None  # of weights

  @property
  def operands(self) -> list[Operand]:
    """The operands of all functions."""
    functions = [each for each in self if each is not None]
    return [each for function in functions for each in function.operands]

  def split(self, parts: Sequence[Any]) -> list[Sequence[Any]]:
    """The parts of the operands of each function."""
    return split(parts, [len(each.operands) if each else 0 for each in self])


def trace(
  request: Request,
  query: jax.Array,
  key: jax.Array,
  tile: tuple[int, int],
  rules: Rules,
) -> TileFunctions:
  """The functions of a tile of a request with these mapped tokens."""
  return TileFunctions(
    _traced_score(request, query, key, tile, rules),
    *(
      each and _traced_block(each, len(request.leading), tile, rules)
      for each in of_request(request, tile[1], Tile)
    ),
  )


def _traced_score(request, query, key, tile, rules) -> TileFunction:
  """The score of mapped tokens [t, D] and [s, D]."""
  rank = len(request.leading)
  score, operands = parameters(request.score, rank)
  tokens = [
    jax.ShapeDtypeStruct((size, array.shape[-1]), array.dtype)
    for size, array in zip(tile, (query, key))
  ]
  arguments = [*tokens, *[_SCALAR] * (2 + rank)]

  def pair(leading, query, key, first_query, first_key, *others):
    indices, parts = indices_of_scores(request, others[:rank]), others[rank:]
    positions = MatrixPositions(
      first_query,
      first_key,
      num_queries=tile[0],
      num_keys=tile[1],
      key_length=request.scores_shape[-1],
      leading=indices,
      look_up=by_distance,
      own_starts=(first_query, first_key),
    )
    query, key = (x.reshape(*leading, *x.shape) for x in (query, key))
    own = dataclasses.replace(request, score=score(parts))
    scores = own.pair_at(query, key, positions)
    if any(x.shape != (*leading, *tile) for x in jax.tree.leaves(scores)):
      raise Undeclared
    return jax.tree.map(
      lambda scores: scores.reshape(tile).astype(request.dtype), scores
    )

  error: Exception | None = None
  for leading in ((), (1,) * rank):
    try:
      function = functools.partial(pair, leading)
      return traced(function, arguments, operands, tile, rules)
    except (AssertionError, RuntimeError, TypeError, ValueError) as failure:
      error = failure
      if isinstance(error, Unsupported) and not isinstance(error, Undeclared):
        raise
  raise Undeclared from error


def checked_normalizer(request: Request, rules: Rules) -> OnlineNormalizer:
  """The normalizer, whose operations kernels have."""
  normalizer = request.online_normalizer
  assert normalizer is not None
  scores: Any = jnp.zeros((1, 1), request.dtype)
  if request.score.denominator is not None:
    scores = scores, scores

  def all_operations(scores):
    maximum = jnp.zeros((1, 1), request.dtype)
    terms = functools.partial(normalizer.terms, maximum=maximum)
    results, pull_back = jax.vjp(terms, scores)
    return normalizer.exponents(scores), pull_back(results)

  check_supported(jax.make_jaxpr(all_operations)(scores).jaxpr, rules)
  return normalizer


def _traced_block(
  of_pairs: OfPairs, rank: int, tile: tuple[int, int], rules: Rules
) -> TileFunction:
  """A function of (first query, first key, *indices)."""
  compute, operands = with_operands(of_pairs, rank)

  def block(first_query, first_key, *others):
    queries = first_query + indices(tile[0], 0)
    keys = first_key + indices(tile[1], 1)
    return jnp.broadcast_to(compute(queries, keys, *others), tile)

  return traced(block, [_SCALAR] * (2 + rank), operands, tile, rules)


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixPositions(KernelPositions):
  """Positions as matrices; kernels have no vectors of integers."""

  def broadcast(self, rank):
    """The positions of queries [..., t, 1] and keys [..., 1, s]."""
    ones = (1,) * (rank - 2)
    queries = self.query_start + indices(self.num_queries, 0)
    keys = self.key_start + indices(self.num_keys, 1)
    return (
      queries.reshape(*ones, *queries.shape),
      keys.reshape(*ones, *keys.shape),
    )
