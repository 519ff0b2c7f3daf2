"""Attention with any normalizer: one block of queries after another.

A normalizer needs whole rows of scores. A block has few queries and all keys
that one of them may attend to, so memory is O(T + S). Derivatives of every mode
and order are JAX's own; `jax.checkpoint` computes a block's scores again.
"""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.implementations.blockwise import tile_sizes
from attention.implementations.blockwise.online_softmax import Captured, Problem
from attention.implementations.blockwise.problem import (
  Pairs,
  make_problem,
  trace_pair,
)
from attention.implementations.blockwise.tiles import Tiling, add, cut, scan
from attention.matmul import weighted_sum_columns
from attention.normalizers import masked_weights
from attention.positional import EMPTY, FULL, PARTIAL
from attention.request import Request
from attention.softmax import Statistics, of_rows

# Blocks that attend to different numbers of keys are rounded up to so many
# numbers, each of which is a program of its own.
_SPANS = 4


def compute_rows(
  request: Request, tiling: Tiling, leading_block: int | None, *tokens
) -> tuple[jax.Array, Statistics]:
  """The context of mapped tokens, padded to tiles, and which rows have keys."""
  elements = tiling.query_tile * tiling.key_length * request.elements_per_pair
  *blocks, whole = tile_sizes.leading_blocks(
    leading_block, 4 * elements, request.scores_shape[:-2], request.leading
  )
  blocks = [*filter(functools.partial(_has_size, request), blocks), whole]
  query, key, value = tokens
  # Products with transposed values have fast transposes, see `matmul`.
  tokens = query, key, jnp.swapaxes(value, -1, -2)
  solve = []
  for span, starts in _spans(tiling):
    pair, span = trace_pair(request, query, key, span, blocks)
    problem, captured = make_problem(pair, Pairs(span, request), ())
    solve.append((problem, captured, _with_leading(span, starts)))
  arrays = tokens, [captured for _, captured, _ in solve]
  zero = axes.varying_zero(arrays, request.dtype)
  shape = (*tiling.leading, tiling.query_length)
  results = [
    jnp.broadcast_to(zero, (*shape, value.shape[-1])),
    jnp.broadcast_to(zero, shape),
  ]
  for problem, captured, starts in solve:
    block = jax.checkpoint(
      functools.partial(_block, request, problem, captured, tokens),
      prevent_cse=False,
    )

    def step(results, start, block=block):
      row = start[:-1]
      return [add(*each, row) for each in zip(results, block(tuple(start)))]

    results = scan(step, results, starts)
  context, has_keys = results
  return context, of_rows(has_keys, request.dtype)


def _block(request, problem: Problem, captured: Captured, tokens, start):
  """The context of a block of rows, and 1 for rows with a visible key."""
  *row, column = start
  tiling, key_start = problem.tiling, (*row[:-1], column)
  query = cut(tokens[0], row, tiling.row)
  key = cut(tokens[1], key_start, tiling.column)
  columns_start = (*key_start[:-1], 0, column)
  columns_size = (*tiling.block, tokens[2].shape[-2], tiling.key_tile)
  value_columns = cut(tokens[2], columns_start, columns_size)
  scores = problem.scores(captured, query, key, start, masked=True)
  # A score that depends on positions may hide keys.
  hides = request.score.reads_positions or problem.bias is not None
  if tiling.has_partial or hides:
    weights = masked_weights(request.normalizer, scores)
    visible = jnp.any(~jnp.isneginf(scores), axis=-1)
  else:
    weights = request.normalizer(scores)
    visible = jnp.ones(scores.shape[:-1], bool)
  weights = problem.dropped(captured, weights, start)
  columns = weighted_sum_columns(weights, value_columns, problem.dtype)
  context = jnp.swapaxes(columns, -1, -2)
  visible = jnp.broadcast_to(visible, context.shape[:-1])
  return context, visible.astype(problem.dtype)


def _has_size(request: Request, block: tuple[int, ...]) -> bool:
  """Whether the normalizer supports a block of this size of leading axes.

  Arrays of the normalizer may have leading axes too.
  """
  leading = map(min, block, request.scores_shape[:-2])
  scores = jax.ShapeDtypeStruct((*leading, 1, 2), request.dtype)
  try:
    return jax.eval_shape(request.normalizer, scores).shape == scores.shape
  except (AssertionError, RuntimeError, TypeError, ValueError):
    return False


def _spans(tiling: Tiling) -> Iterator[tuple[Tiling, np.ndarray]]:
  """Tilings with one tile of keys per block, and their starts, int32 [P, 2].

  The keys of a block lie between the first and the last visible tile.
  """
  visibility, size = tiling.visibility, tiling.key_tile
  count = visibility.shape[1]
  rows = np.flatnonzero((visibility != EMPTY).any(axis=1))
  seen = visibility[rows] != EMPTY
  first = seen.argmax(axis=1)
  lengths = count - seen[:, ::-1].argmax(axis=1) - first
  unit = -(-lengths.max(initial=1) // _SPANS)
  lengths = np.minimum(-(-lengths // unit) * unit, count)
  first = np.minimum(first, count - lengths)
  for length in np.unique(lengths):
    chosen = lengths == length
    starts = np.stack([rows, first], axis=-1)[chosen]
    is_full = all(
      (visibility[row, column : column + length] == FULL).all()
      for row, column in starts
    )
    span = np.full((len(visibility), 1), FULL if is_full else PARTIAL, np.int8)
    yield (
      dataclasses.replace(tiling, key_tile=int(length) * size, visibility=span),
      starts * np.asarray([tiling.query_tile, size]),
    )


def _with_leading(tiling: Tiling, starts: np.ndarray) -> np.ndarray:
  """The starts along all axes, int32 [P, leading + 2]."""
  leading = tiling.leading_starts()
  return np.concatenate(
    [
      np.repeat(leading, len(starts), axis=0),
      np.tile(starts, (len(leading), 1)),
    ],
    axis=-1,
  ).astype(np.int32)
