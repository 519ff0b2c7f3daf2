"""The functions of a tile that a kernel evaluates, made from a request."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention.head_parameters import declared
from attention.implementations.pallas import dropout
from attention.implementations.pallas.functions import (
  Rules,
  TileFunction,
  check_supported,
  traced,
)
from attention.implementations.pallas.look_up import by_distance
from attention.implementations.pallas.operands import (
  Blocks,
  Kind,
  Operand,
  Recorder,
  Unsupported,
  aligned_right,
)
from attention.implementations.pallas.pair_tile import Tile
from attention.implementations.pallas.pairwise import values
from attention.masks import types as masks
from attention.normalizers import OnlineNormalizer
from attention.positional import Pairwise
from attention.request import Request
from attention.scores import Positions, Score

_SCALAR = jax.ShapeDtypeStruct((), jnp.int32)
UNDECLARED = (
  "needs a score of one head as a function of matrices [t, D] and [s, D], "
  "which returns [t, s]; a dataclass declares arrays of several heads by "
  "dataclasses.field(metadata=attention.scores.MATRIX), VECTOR or SCALAR"
)


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
    result = []
    for function in self:
      number = 0 if function is None else len(function.operands)
      result.append(parts[:number])
      parts = parts[number:]
    return result


def trace(
  request: Request,
  query: jax.Array,
  key: jax.Array,
  tile: tuple[int, int],
  rules: Rules,
) -> TileFunctions:
  """The functions of a tile of a request with these mapped tokens."""
  bias = visible = multiplier = None
  if request.bias is not None:
    bias = _traced_pairwise(request, [request.bias], tile, rules)
  if request.dropout is not None:
    factors, rank = (
      dropout.of_request(request.dropout, request),
      len(request.leading),
    )
    multiplier = _traced_block(factors, rank, tile, rules)
  parts = [] if request.mask is None else [request.mask]
  key_length = request.scores_shape[-1]
  if key_length % tile[1]:
    parts.append(masks.Below(key_length))
  if parts:
    visible = _traced_pairwise(request, parts, tile, rules)
  pair = _traced_score(request, query, key, tile, rules)
  return TileFunctions(pair, bias, visible, multiplier)


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
      raise Unsupported(UNDECLARED)
    return jax.tree.map(
      lambda scores: scores.reshape(tile).astype(request.dtype), scores
    )

  error: Exception | None = None
  for leading in ((), (1,) * rank):
    try:
      function = functools.partial(pair, leading)
      return traced(function, arguments, operands, tile, rules)
    except (AssertionError, RuntimeError, TypeError, ValueError) as failure:
      if isinstance(failure, Unsupported) and failure.args[0] != UNDECLARED:
        raise
      error = failure
  raise Unsupported(UNDECLARED) from error


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


def parts_by_position(numbers: Any, *, is_shifted: bool) -> ByPosition:
  """What stands for an array of a score, at the positions of a tile."""
  if is_shifted:
    raise Unsupported("does not support arrays by position that are shifted")
  if not isinstance(numbers, ByPosition):
    raise Unsupported(
      "needs numbers by position in a field of the score that is declared by "
      "dataclasses.field(metadata=attention.scores.BY_POSITION)"
    )
  return numbers


def _traced_pairwise(
  request: Request, parts: Sequence[Pairwise], tile, rules
) -> TileFunction:
  """A bias, or the conjunction of masks, [t, s]."""
  rank, (*_, length, key_length) = len(request.leading), request.scores_shape

  def block(source, queries, keys, indices):
    del indices
    lengths = length, key_length
    at = Tile(source, queries, keys, rank, lengths=lengths)
    return functools.reduce(
      jnp.logical_and, [values(each, at) for each in parts]
    )

  return _traced_block(block, rank, tile, rules)


def _traced_block(
  function: Callable, rank: int, tile: tuple[int, int], rules: Rules
) -> TileFunction:
  """A function (source, queries [t, 1], keys [1, s], indices) of positions."""
  recorder = Recorder()
  one = jnp.zeros((1, 1), jnp.int32)
  function(recorder, one, one, [0] * rank)

  def block(first_query, first_key, *others):
    indices, blocks = others[:rank], others[rank:]
    queries = first_query + _count(tile[0], 0)
    keys = first_key + _count(tile[1], 1)
    result = function(Blocks(blocks), queries, keys, indices)
    return jnp.broadcast_to(result, tile)

  arguments = [_SCALAR] * (2 + rank)
  return traced(block, arguments, recorder.operands, tile, rules)


def _count(size: int, axis: int) -> jax.Array:
  """0, 1, ... along one axis of a matrix, int32 [size, 1] or [1, size]."""
  shape = [1, 1]
  shape[axis] = size
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


@dataclasses.dataclass(frozen=True, eq=False)
class MatrixPositions(Positions):
  """Positions as matrices; kernels have no vectors of integers."""

  own_starts: tuple[Any, Any] = dataclasses.field(kw_only=True)  # of the tile

  def at_queries(self, numbers):
    """The numbers of the tile's queries, [t, 1]."""
    return self._parts(numbers).of_queries

  def at_keys(self, numbers):
    """The numbers of the tile's keys, [1, s]."""
    return self._parts(numbers).of_keys

  def _parts(self, numbers) -> ByPosition:
    starts = self.query_start, self.key_start
    is_shifted = any(map(operator.is_not, starts, self.own_starts))
    return parts_by_position(numbers, is_shifted=is_shifted)

  def broadcast(self, rank):
    """The positions of queries [..., t, 1] and keys [..., 1, s]."""
    ones = (1,) * (rank - 2)
    queries = self.query_start + _count(self.num_queries, 0)
    keys = self.key_start + _count(self.num_keys, 1)
    return (
      queries.reshape(*ones, *queries.shape),
      keys.reshape(*ones, *keys.shape),
    )
