"""Functions of a tile, made from a score, a mask, a bias and dropout."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.implementations.blockwise.tiles import Tiling, cut
from attention.implementations.closure import (
  Program,
  identity,
  without_captured,
)
from attention.positional.base import Pairwise
from attention.positional.pair_block import PairBlock
from attention.positional.position_arrays import TilePositions
from attention.request import Request
from attention.scores import Positions
from attention.scores.pairwise import follows_leading


class Captured(NamedTuple):
  """The arrays that each function of a `Problem` captured."""

  pair: list[Any]
  bias: list[Any]
  visible: list[Any]
  multiplier: list[Any]
  occupied: list[Any]


class Problem(NamedTuple):
  """Attention as functions of a tile."""

  tiling: Tiling
  dtype: Any
  # The context has more leading axes than the statistics where values share
  # scores.
  row_leading: tuple[int, ...]
  precision: str | None  # of matrix products, see `Request.precision`
  normalizer: Any  # an `OnlineNormalizer` without arrays, or None
  bias_may_hide: bool  # whether a number of the bias may be -inf
  # (captured, query tile, key tile, start of the tile) -> scores [..., t, s],
  # see `Request.pair_at`
  pair: Callable
  # The others are (captured, start of the tile) -> array [..., t, s].
  bias: Callable | None
  visible: Callable | None  # None if no tile is partial
  multiplier: Callable | None
  # -> bool: whether the tile has a visible pair. None if all may have one.
  occupied: Callable | None

  def scores(
    self, captured: Captured, query, key, start: Sequence[Any], *, masked: bool
  ) -> Any:
    """The scores and bias of a tile; if `masked`, -inf for hidden pairs."""
    bias = visible = None
    if self.bias is not None:
      bias = self.bias(captured.bias, start)
    if masked and self.visible is not None:
      visible = self.visible(captured.visible, start)

    def completed(scores):
      scores = scores.astype(self.dtype)
      if bias is not None:
        scores = scores + bias
        if self.bias_may_hide:
          # The scores of hidden pairs may be infinite or have infinite
          # derivatives.
          scores = jnp.where(jnp.isneginf(bias), -jnp.inf, scores)
      if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
      return scores

    return jax.tree.map(completed, self.pair(captured.pair, query, key, start))

  def allowed(self, captured: Captured, start: Sequence[Any]) -> jax.Array:
    """Which pairs of a tile neither the mask nor a bias of -inf hides."""
    allowed = jnp.ones((1,) * len(start), bool)
    if self.visible is not None:
      allowed = allowed & self.visible(captured.visible, start)
    if self.bias is not None:
      allowed = allowed & ~jnp.isneginf(self.bias(captured.bias, start))
    return allowed

  def dropped(self, captured: Captured, weights, start) -> jax.Array:
    """The weights of a tile after dropout."""
    if self.multiplier is None:
      return weights
    return weights * self.multiplier(captured.multiplier, start)

  def zeros(self, arguments: Any, value_size: int):
    """Zeros for a context and for rows that depend on `arguments`."""
    tiling = self.tiling
    zero = axes.varying_zero(arguments, self.dtype)
    context = (*tiling.leading, tiling.query_length, value_size)
    rows = (*self.row_leading, tiling.query_length)
    return jnp.broadcast_to(zero, context), jnp.broadcast_to(zero, rows)


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
    rows, columns = self._positions(start)
    block = pairs.values(PairBlock(rows, columns, len(self.tiling.leading)))
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
  is_skipped = options.occupied((0,) * len(start)) is not True
  for function, owner, is_needed in (
    (options.bias, request.bias, request.bias is not None),
    (options.visible, request.mask, tiling.has_partial),
    (options.multiplier, None, request.dropout is not None),
    (options.occupied, request.mask, is_skipped),
  ):
    if is_needed:
      owner = identity(owner)
      traced.append(without_captured(function, start, owner=owner))
    else:
      traced.append((None, []))
  functions, captured = zip(*traced)
  problem = Problem(
    tiling,
    request.dtype,
    row_leading,
    request.precision,
    request.online_normalizer,
    request.bias_may_hide,
    *functions,
  )
  return problem, Captured(*captured)
