"""Functions of a tile, made from a score, a mask, a bias and dropout."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention import axes
from attention.implementations.blockwise.online_softmax import Captured, Problem
from attention.implementations.blockwise.tiles import Tiling, cut, put, scan
from attention.implementations.closure import (
  Program,
  identity,
  without_captured,
)
from attention.positional import Pairwise, TilePositions
from attention.request import Request
from attention.scores import Positions
from attention.scores.pairwise import follows_leading

# A function or None, and the arrays that it captured.
Traced = tuple[Program | None, list[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class TileOptions:
  """The mask, bias and dropout of a request for the tile at a given `start`."""

  tiling: Tiling
  request: Request

  def visible(self, start) -> jax.Array:
    """Which pairs are visible, bool, broadcasts to [..., t, s]."""
    _, columns = self._positions(start)
    visible = columns.array[None, :] < self.request.scores_shape[-1]
    visible = axes.with_rank(visible, len(self.tiling.leading) + 2)
    if self.request.mask is None:
      return visible
    return visible & self._tile(self.request.mask, start)

  def occupied(self, start) -> jax.Array | bool:
    """Whether a tile may have a visible pair; True if that is unknown."""
    if self.request.mask is None:
      return True
    return self.request.mask.may_show(*self._positions(start))

  def bias(self, start) -> jax.Array:
    """The bias of a tile."""
    return self._tile(self.request.bias, start).astype(self.request.dtype)

  def multiplier(self, start) -> jax.Array:
    """The factors by which dropout multiplies the weights."""
    assert self.request.dropout is not None
    leading = self.tiling.leading
    numbers = jnp.arange(math.prod(leading)).reshape(leading)
    numbers = cut(numbers, start[:-2], self.tiling.block)
    rows, columns = self._positions(start)
    shape = (*leading, *self.request.scores_shape[-2:])
    dtype = self.request.dtype
    return self.request.dropout.block(rows, columns, numbers, shape, dtype)

  def _positions(self, start):
    return (
      TilePositions(start[-2], self.tiling.query_tile),
      TilePositions(start[-1], self.tiling.key_tile),
    )

  def _tile(self, pairs: Pairwise | None, start):
    assert pairs is not None
    rank = len(self.tiling.leading)
    rows, columns = self._positions(start)
    block = pairs.block(rows, columns, rank)
    block = axes.with_rank(block, rank + 2)
    return cut(block, start[:-2], self.tiling.block)


def trace_pair(
  request: Request,
  query: jax.Array,
  key: jax.Array,
  tiling: Tiling,
  blocks: Sequence[tuple[int, ...]],
) -> tuple[Traced, Tiling]:
  """A tile's score, and the tiling with the first block that it supports."""
  # A score whose arrays have leading axes (heads) needs blocks with all entries
  # of these axes. Every score supports the last block. Tokens are mapped.
  whole = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2])
  if len(blocks) > 1 and not follows_leading(request.score, query, key):
    blocks = blocks[-1:]
  for block in blocks[:-1]:
    tiling = dataclasses.replace(tiling, block=block)
    shape = tuple(map(min, block, whole))
    try:
      return _trace_pair(request, query, key, tiling, shape), tiling
    except (AssertionError, RuntimeError, TypeError, ValueError):
      pass
  tiling = dataclasses.replace(tiling, block=blocks[-1])
  return _trace_pair(request, query, key, tiling), tiling


def _trace_pair(request, query, key, tiling, leading=None) -> Traced:
  whole = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2])

  def pair(query, key, start):
    positions = Positions(
      start[-2],
      start[-1],
      query.shape[-2],
      key.shape[-2],
      key_length=request.scores_shape[-1],
      leading=tuple(
        0 if size == 1 else index for index, size in zip(start, whole)
      ),
    )
    scores = request.pair_at(query, key, positions)
    shapes = {each.shape[:-2] for each in jax.tree.leaves(scores)}
    if leading is not None and shapes != {leading}:
      raise ValueError("the score does not follow its arguments' shapes")
    return scores

  return without_captured(
    pair,
    cut(query, (0,) * query.ndim, tiling.row),
    cut(key, (0,) * key.ndim, tiling.column),
    start_type(tiling),
    owner=identity(request.score),
  )


def start_type(tiling: Tiling) -> tuple[jax.ShapeDtypeStruct, ...]:
  """The type of the start of a tile."""
  return (jax.ShapeDtypeStruct((), jnp.int32),) * (len(tiling.leading) + 2)


def make_problem(
  pair: Traced, options: TileOptions, row_leading: tuple[int, ...]
) -> tuple[Problem, Captured]:
  """The functions of a tile, and the arrays that they captured."""
  tiling, request = options.tiling, options.request
  start = start_type(tiling)
  traced: list[tuple[Any, list[Any]]] = [pair]
  for function, is_needed in (
    (options.bias, request.bias is not None),
    (options.visible, tiling.has_partial),
    (options.multiplier, request.dropout is not None),
    (options.occupied, options.occupied((0,) * len(start)) is not True),
  ):
    traced.append(
      without_captured(function, start) if is_needed else (None, [])
    )
  functions, captured = zip(*traced)
  problem = Problem(
    tiling,
    request.dtype,
    row_leading,
    request.precision,
    request.online_normalizer,
    *functions,
  )
  return problem, Captured(*captured)


def rows_attending(
  options: TileOptions, keys: jax.Array, queries: jax.Array | None = None
) -> jax.Array:
  """Which queries attend to a flagged key, or are flagged and attend to any."""
  # Flags are bool, of keys [..., S] and of queries [..., T].
  tiling, request = options.tiling, options.request
  length = request.scores_shape[-2]
  if queries is None:
    queries = jnp.zeros(length, bool)
  flags = keys, queries
  is_eager = request.platform is not None
  # Usually no token is flagged.
  if (
    is_eager
    and not any(isinstance(each, jax.core.Tracer) for each in flags)
    and not any(each.any() for each in flags)
  ):
    return jnp.zeros((*tiling.leading, length), bool)
  padded = [
    jnp.pad(each, [(0, 0)] * (each.ndim - 1) + [(0, rounded - each.shape[-1])])
    for each, rounded in zip(flags, (tiling.key_length, tiling.query_length))
  ]
  problem, captured = make_problem((None, []), options, ())
  compute = _compiled_rows_attending if is_eager else _rows_attending
  return compute(problem, captured, *padded)[..., :length]


def _rows_attending(
  problem: Problem, captured: Captured, keys: jax.Array, queries: jax.Array
) -> jax.Array:
  """`rows_attending`, for S and T rounded up to whole tiles."""
  tiling = problem.tiling
  none = axes.varying_zero((keys, queries, captured), jnp.bool_)
  none = jnp.broadcast_to(none, (*tiling.leading, tiling.query_length))
  queries = jnp.broadcast_to(queries, none.shape)

  def step(rows, start):
    *row, column = start
    of_keys = cut(keys, (*row[:-1], column), tiling.column)
    of_queries = cut(queries, row, tiling.row)
    allowed = problem.allowed(captured, (*row, column))
    flagged = of_keys[..., None, :] | of_queries[..., :, None]
    seen = jnp.any(allowed & flagged, axis=-1)
    return put(rows, seen | cut(rows, row, tiling.row), row)

  return jax.lax.cond(
    jnp.any(keys) | jnp.any(queries),
    lambda: scan(step, none, tiling.visible_tiles()),
    lambda: none,
  )


_compiled_rows_attending = jax.jit(_rows_attending, static_argnums=0)
