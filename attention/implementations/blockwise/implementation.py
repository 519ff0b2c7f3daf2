"""The blockwise implementation, from a request to its result."""

import dataclasses
import functools
import math
from collections.abc import Hashable

import jax
import jax.numpy as jnp

from attention.arrays.meshes import num_automatic_devices
from attention.arrays.softmax import Statistics, part_of, without_keys
from attention.checks import check_positive
from attention.implementations.blockwise import tile_sizes
from attention.implementations.blockwise.derivative import (
  differentiable_context,
)
from attention.implementations.blockwise.flagged_rows import rows_attending
from attention.implementations.blockwise.problem import (
  TileOptions,
  make_problem,
  trace_pair,
)
from attention.implementations.blockwise.rows import compute_rows
from attention.implementations.blockwise.tiles import Tiling, with_length
from attention.implementations.non_finite import with_finite_tokens
from attention.masks.tile_visibility import grid_visibility
from attention.normalizers import is_online, is_softmax
from attention.request import Request

# Programs are kept by the values of problems, which hold no arrays.
_compiled_context = jax.jit(differentiable_context, static_argnums=0)


@dataclasses.dataclass(frozen=True)
class Blockwise:
  """The blockwise implementation, with tiles of chosen sizes.

  `implementation="blockwise"` chooses all sizes. To set some of them, pass an
  instance, for example `implementation=Blockwise(query_block=128)`.

  Attributes:
    query_block: the queries of a tile; None chooses their number.
    key_block: the keys of a tile; None chooses their number.
    leading_block: the largest number of leading entries (heads times batch) of
      a tile; None chooses it.

  Raises:
    ValueError: if a size is not positive.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import attend
    >>> tokens = jnp.eye(5)
    >>> small = Blockwise(query_block=2, key_block=2)
    >>> attend(tokens, tokens, tokens, implementation=small).shape
    (5, 5)
  """

  query_block: int | None = None
  key_block: int | None = None
  leading_block: int | None = None

  def __post_init__(self):
    check_positive(**dataclasses.asdict(self))

  def obstacle(self, request: Request) -> str | None:
    """The reason if a size is a symbol of `jax.export`, or None."""
    if request.has_known_sizes:
      return None
    return (
      "needs known sizes, got scores of shape "
      f"{request.scores_shape}; implementation='reference' serves any size"
    )

  def __call__(self, request: Request) -> tuple[jax.Array, Statistics]:
    """The context [..., T, E] and the statistics [..., T]."""
    if request.is_empty:
      rows = (*request.leading, request.scores_shape[-2])
      return (
        jnp.zeros((*rows, request.value.shape[-1]), request.dtype),
        without_keys(jnp.zeros(rows, request.dtype)),
      )
    request = request.prepared
    context, statistics = with_finite_tokens(request, self._compute)
    assert statistics is not None
    return context, statistics

  def variant(self, request: Request) -> Hashable:
    """The sizes of tiles, which depend on the platform."""
    if not request.has_known_sizes or request.is_empty:
      return None
    tile = self._sides(request)
    blocks = tile_sizes.leading_blocks(request, self.leading_block, *tile)
    return *tile, tuple(blocks)

  def _compute(self, request: Request):
    """Context, statistics and the function from flagged keys to rows."""
    query, key, value = request.tokens
    tiling = self.tiling(request)
    context, statistics = self.of_mapped(
      request,
      request.score.map_query(query),
      request.score.map_key(key),
      value.astype(jnp.result_type(query, value)),
      tiling=tiling,
    )
    if request.combined is not None and not is_softmax(request.normalizer):
      context, statistics = part_of(request.combined, context)
    options = TileOptions(tiling, request)
    return context, statistics, functools.partial(rows_attending, options)

  def of_mapped(
    self,
    request: Request,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    tiling: Tiling | None = None,
  ) -> tuple[jax.Array, Statistics]:
    """The context and the statistics of mapped tokens, all of them finite."""
    length, tiling = request.scores_shape[-2], tiling or self.tiling(request)
    compute = _online if is_online(request.normalizer) else compute_rows
    context, statistics = compute(
      request,
      tiling,
      self.leading_block,
      with_length(query, tiling.query_length),
      with_length(key, tiling.key_length),
      with_length(value, tiling.key_length, "constant"),
    )
    context = context[..., :length, :]
    statistics = Statistics(*(each[..., :length] for each in statistics))
    return context, statistics.broadcast_to(context.shape[:-1])

  def _sides(self, request: Request) -> tuple[int, int]:
    """The numbers of queries and keys in a tile."""
    length, key_length = request.scores_shape[-2:]
    elements, entries = request.elements_per_pair, 1
    if request.target != "cpu":
      entries = -(-math.prod(request.leading) // num_automatic_devices())
    limits = tile_sizes.limits(request.target)
    elements *= entries
    keys = limits.side(key_length, self.key_block, elements)
    if is_online(request.normalizer):
      multiple = limits.queries_per_key
      return limits.side(length, self.query_block, elements, multiple), keys
    row = key_length * elements
    return limits.block_of_rows(length, self.query_block, row), keys

  def tiling(self, request: Request) -> Tiling:
    """The tiles, with all entries of the leading axes in each."""
    tile, leading = self._sides(request), request.leading
    visible = grid_visibility(request.mask, request.scores_shape[-2:], tile)
    return Tiling(leading, leading, *tile, visible)


def _online(
  request: Request, tiling: Tiling, leading_block: int | None, query, key, value
) -> tuple[jax.Array, Statistics]:
  """The context and the statistics of mapped tokens, padded to tiles."""
  blocks = tile_sizes.leading_blocks(
    request, leading_block, tiling.query_tile, tiling.key_tile
  )
  pair, tiling = trace_pair(request, query, key, tiling, blocks)
  # Values may have leading axes that the scores do not have.
  shared = not request.is_masked and request.combined is None
  row_leading = request.scores_shape[:-2] if shared else request.leading
  problem, captured = make_problem(
    pair, TileOptions(tiling, request), row_leading
  )
  combined = request.combined
  if combined is not None:
    combined = _padded(*combined, tiling.query_length)
  # Outside of `jax.jit` every loop would be compiled at every call.
  run = (
    differentiable_context if request.platform is None else _compiled_context
  )
  return run(problem, captured, query, key, value, combined=combined)


def _padded(context, statistics, length: int):
  """A combined context and its statistics, with empty rows after them."""
  rows = (with_length(each, length, "constant", -1) for each in statistics)
  return with_length(context, length, "constant"), Statistics(*rows)
