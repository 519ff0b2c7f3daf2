"""The kernels of a request for TPUs: its functions, and the sizes of tiles."""

import functools
import math
from collections.abc import Sequence

import jax

from attention.arrays import axes
from attention.implementations.pallas.implementation import Pallas
from attention.implementations.pallas.normalizers import Sparse
from attention.implementations.pallas.operands import Unsupported
from attention.implementations.pallas.products import kernel_precision
from attention.implementations.pallas.tpu import tile_functions
from attention.implementations.pallas.tpu.problem import Problem
from attention.implementations.pallas.tpu.tokens import LANES
from attention.implementations.pallas.tpu.visit import rules
from attention.implementations.pallas.visits import Visibility
from attention.masks.tile_visibility import grid_visibility
from attention.request import Request

# Tiles are multiples of the lanes of a register. Larger ones load tokens less
# often.
_SIDE = 512
# The elements of the largest intermediate array of a score.
_CHUNK = 1 << 18
# The scores of rows that a kernel keeps.
_ROWS = 1 << 23


def make_problem(
  options: Pallas, request: Request, tokens: Sequence[jax.Array]
) -> Problem:
  """The kernels of a request, for mapped tokens.

  Raises `Unsupported` for what they do not support.
  """
  tile = _tile(options, request)
  own = rules(options.interpret)
  query, key, _ = tokens
  trace = functools.partial(
    tile_functions.trace, request, query, key, rules=own
  )
  functions, chunk = trace(tile), tile[0]
  elements = functions.pair.largest_array // math.prod(tile)
  if elements > 1:
    # Arrays of features of pairs are padded to whole registers.
    tile = (LANES, LANES)
    padded = axes.round_up(elements, LANES)
    chunk = max(8, min(LANES, _CHUNK // (LANES * padded)))
    functions = trace((chunk, tile[1]))
  return Problem(
    leading=request.leading,
    tile=tile,
    chunk=chunk,
    functions=functions,
    visibility=_visibility(request, tile),
    normalizer=tile_functions.checked_normalizer(request, own),
    dtype=request.dtype,
    precision=kernel_precision(request.precision),
    is_masked=request.is_masked,
    bias_may_hide=request.bias_may_hide,
    interpret=options.interpret,
  )


def _tile(options: Pallas, request: Request) -> tuple[int, int]:
  """The queries and keys of a tile."""
  length, key_length = request.scores_shape[-2:]
  queries = _side(length, options.query_block)
  keys = _side(key_length, options.key_block)
  if isinstance(request.normalizer, Sparse):
    queries = _queries_with_rows(request, queries, keys)
  return queries, keys


def _queries_with_rows(request: Request, queries: int, keys: int) -> int:
  """At most so many queries, that all of their scores fit into memory."""
  while True:
    visibility = _visibility(request, (queries, keys))
    most = keys * visibility.most_in_a_row
    if queries * most <= _ROWS:
      return queries
    if queries == LANES:
      raise Unsupported(
        f"computes entmax and sparsemax of at most {_ROWS // LANES} visible "
        f"keys, got {most}"
      )
    queries = max(LANES, queries // (2 * LANES) * LANES)


def _visibility(request: Request, tile: tuple[int, int]) -> Visibility:
  lengths = request.scores_shape[-2:]
  return Visibility(grid_visibility(request.mask, lengths, tile))


def _side(length: int, asked: int | None) -> int:
  """The queries or keys of a tile: the most that add few to the length."""
  units = -(-length // LANES)
  if asked is not None:
    return min(asked, units * LANES)
  sizes = range(min(_SIDE // LANES, units), 0, -1)
  added = [(-units % size) for size in sizes]
  best = next(
    size for size, more in zip(sizes, added) if 8 * more <= units or size == 1
  )
  return best * LANES
