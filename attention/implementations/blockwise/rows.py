"""Attention with any normalizer: one block of queries after another.

A normalizer needs whole rows of scores. A block has few queries and all keys
that one of them may attend to, so memory is O(T + S). Derivatives of every mode
and order are JAX's own; `jax.checkpoint` computes a block's scores again.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention.arrays import axes
from attention.arrays.matmul import weighted_sum_columns
from attention.arrays.softmax import Statistics, of_rows
from attention.implementations.blockwise import tile_sizes
from attention.implementations.blockwise.problem import (
  Captured,
  Problem,
  TileOptions,
  make_problem,
  start_type,
  trace_pair,
)
from attention.implementations.blockwise.tiles import (
  Tiling,
  add,
  cut,
  cut_columns,
  scan,
  with_length,
)
from attention.implementations.closure import (
  Program,
  identity,
  without_captured,
)
from attention.normalizers import (
  checked_fraction,
  follows_leading,
  masked_fraction,
)
from attention.positional.base import EMPTY, FULL, PARTIAL
from attention.request import Request

# Blocks that attend to different numbers of keys are rounded up to so many
# numbers, each of which is a program of its own.
_SPANS = 4


class Span(NamedTuple):
  """Blocks that attend to the same number of keys, as functions of a block."""

  problem: Problem
  # (captured, scores [..., t, s]) -> numerators of that shape, which are 0 for
  # hidden pairs, and divisors [..., t], which are 0 for rows without keys
  fraction: Program


class Arrays(NamedTuple):
  """The arrays of a `Span`: those its functions captured, and the starts."""

  captured: Captured
  normalizer: list[Any]
  starts: np.ndarray  # int32 [P, leading + 2]


def compute_rows(
  request: Request, tiling: Tiling, leading_block: int | None, *tokens
) -> tuple[jax.Array, Statistics]:
  """The context of mapped tokens, padded to tiles, and which rows have keys."""
  *blocks, whole = tile_sizes.leading_blocks(
    request, leading_block, tiling.query_tile, tiling.key_tile
  )
  blocks = [*filter(functools.partial(_has_size, request), blocks), whole]
  query, key, value = tokens
  parts = [
    _traced(request, query, key, span, starts, blocks)
    for span, starts in _spans(tiling, request.normalizer.ignores_hidden)
  ]
  spans, arrays = zip(*parts)
  # Outside of `jax.jit` every loop would be compiled at every call.
  run = _context if request.platform is None else _compiled_context
  # For gradients [..., S, D] of keys and values, XLA's CPU backend takes three
  # times as long as for [..., D, S].
  columns = (jnp.swapaxes(each, -1, -2) for each in (key, value))
  context, has_keys = run(spans, arrays, query, key, *columns)
  return context, of_rows(has_keys, request.dtype)


def _traced(
  request: Request, query, key, tiling: Tiling, starts: np.ndarray, blocks
) -> tuple[Span, Arrays]:
  """The functions of the blocks at `starts`, and the arrays they captured."""
  pair, tiling = trace_pair(request, query, key, tiling, blocks)
  problem, captured = make_problem(pair, TileOptions(tiling, request), ())
  make_fraction = checked_fraction
  has_bias = request.bias is not None
  # A score that depends on positions may hide keys.
  if tiling.has_partial or request.score.reads_positions or has_bias:
    make_fraction = masked_fraction
  fraction: Callable = functools.partial(make_fraction, request.normalizer)
  if not request.normalizer.ignores_hidden:
    fraction = _of_first_keys(fraction, request.scores_shape[-1])
  owner, found = identity(request.normalizer), []

  # The result of `jax.eval_shape` would lack the mesh of `jax.shard_map`.
  def trace(*arguments):
    scores = _scores(problem, captured, *arguments)
    found.append(without_captured(fraction, scores, owner=owner))

  columns = jnp.swapaxes(key, -1, -2)
  jax.eval_shape(trace, query, key, columns, start_type(tiling))
  ((program, normalizer),) = found
  starts = tiling.with_leading(starts)
  return Span(problem, program), Arrays(captured, normalizer, starts)


def _of_first_keys(fraction: Callable, number: int) -> Callable:
  """A fraction of rows without the keys that only fill the last tile."""

  def of_first_keys(scores):
    numerators, divisors = fraction(scores[..., :number])
    length = scores.shape[-1]
    return with_length(numerators, length, "constant", axis=-1), divisors

  return of_first_keys


def _context(
  spans: tuple[Span, ...], arrays: tuple[Arrays, ...], *tokens: jax.Array
) -> list[jax.Array]:
  """The context, and which rows have a visible key."""
  # `tokens` are the query, the key, and the key and the value in columns.
  tiling, dtype = spans[0].problem.tiling, spans[0].problem.dtype
  zero = axes.varying_zero((arrays, tokens), dtype)
  rows = (*tiling.leading, tiling.query_length)
  results = [
    jnp.broadcast_to(zero, (*rows, tokens[-1].shape[-2])),
    jnp.broadcast_to(zero, rows),
  ]
  for span, (captured, normalizer, starts) in zip(spans, arrays):
    block = jax.checkpoint(
      functools.partial(_block, span, captured, normalizer, tokens),
      prevent_cse=False,
    )

    def step(results, start, block=block):
      row = start[:-1]
      return [add(*each, row) for each in zip(results, block(tuple(start)))]

    results = scan(step, results, starts)
  sums, divisors = results
  has_keys = divisors != 0.0
  return [sums / jnp.where(has_keys, divisors, 1.0)[..., None], has_keys]


_compiled_context = jax.jit(_context, static_argnums=0)


def _block(span: Span, captured: Captured, normalizer, tokens, start):
  """The sums of values by numerators, for a block of rows, and the divisors."""
  problem, (query, key, key_columns, value_columns) = span.problem, tokens
  tiling = problem.tiling
  scores = _scores(problem, captured, query, key, key_columns, start)
  numerators, divisors = span.fraction(normalizer, scores)
  numerators = problem.dropped(captured, numerators, start)
  values = cut_columns(tiling, value_columns, start)
  columns = weighted_sum_columns(numerators, values, problem.dtype)
  sums = jnp.swapaxes(columns, -1, -2)
  return sums, jnp.broadcast_to(divisors, sums.shape[:-1])


def _scores(problem: Problem, captured, query, key, key_columns, start):
  """The scores of a block of rows, -inf for hidden pairs."""
  *row, column = start
  tiling = problem.tiling
  query = cut(query, row, tiling.row)
  key = _with_tangents_in_columns(
    cut(key, (*row[:-1], column), tiling.column),
    cut_columns(tiling, key_columns, start),
  )
  return problem.scores(captured, query, key, start, masked=True)


@jax.custom_jvp
def _with_tangents_in_columns(tokens, columns):
  """Tokens [..., s, D], whose derivatives are those of their columns."""
  # Both arguments have the same content. Where JAX ignores the rule below, as
  # it does inside a `scan` of second order, the derivatives are those of the
  # tokens.
  del columns
  return tokens


@_with_tangents_in_columns.defjvp
def _with_tangents_in_columns_jvp(primals, tangents):
  return _with_tangents_in_columns(*primals), jnp.swapaxes(tangents[1], -1, -2)


def _has_size(request: Request, block: tuple[int, ...]) -> bool:
  """Whether the normalizer supports a block of this size of leading axes."""
  # Arrays of the normalizer may have leading axes too, and a function of the
  # user may read heads and examples.
  shape, normalizer = request.scores_shape, request.normalizer
  scores = jax.ShapeDtypeStruct((*map(min, block, shape), 1, 2), request.dtype)
  try:
    if jax.eval_shape(normalizer, scores).shape != scores.shape:
      return False
  except (AssertionError, RuntimeError, TypeError, ValueError):
    return False
  cut = {n for n, size in enumerate(block) if size < shape[n]}
  return follows_leading(normalizer, shape, request.dtype, cut)


def _spans(
  tiling: Tiling, are_cut: bool
) -> Iterator[tuple[Tiling, np.ndarray]]:
  """Tilings with one tile of keys per block, and their starts, int32 [P, 2]."""
  # The keys of a block lie between the first and the last visible tile.
  visibility, size = tiling.visibility, tiling.key_tile
  count = visibility.shape[1]
  # A mask may hide all pairs; there has to be one block at least.
  rows = np.flatnonzero((visibility != EMPTY).any(axis=1))
  rows = rows if rows.size else np.zeros(1, int)
  visible = visibility[rows] != EMPTY
  if not are_cut:
    visible = np.ones_like(visible)
  first = visible.argmax(axis=1)
  lengths = count - visible[:, ::-1].argmax(axis=1) - first
  unit = -(-lengths.max(initial=1) // _SPANS)
  lengths = np.minimum(axes.round_up(lengths, unit), count)
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
