"""Calls of the kernels, and their code for one visit of a tile."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.functions import matrix_product
from attention.implementations.pallas.operands import Operand
from attention.implementations.pallas.rows import rows_of_gradients
from attention.implementations.pallas.tile_functions import TileFunctions
from attention.implementations.pallas.tpu.grid import (
  TileGrid,
  core_2d,
  inputs_of,
  row_inputs,
)
from attention.implementations.pallas.tpu.visit import as_row
from attention.implementations.pallas.visits import FIRST, LAST, Visibility
from attention.softmax import Statistics


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """What the kernels of one call share."""

  leading: tuple[int, ...]
  tile: tuple[int, int]
  chunk: int  # the queries of which scores are computed at once
  functions: TileFunctions  # of a chunk of queries and a tile of keys
  visibility: Visibility
  dtype: Any  # of the statistics
  precision: jax.lax.Precision  # of products with values
  # Whether keys may be hidden. NaN in a hidden token then changes nothing, and
  # the rows that attend to NaN become NaN, without derivatives.
  is_masked: bool
  interpret: Any
  has_gradients: ClassVar[bool] = True
  completes_rows: ClassVar[bool] = False

  @property
  def score_operands(self) -> Sequence[Operand]:
    """The arrays that the score reads."""
    return self.functions.pair.operands

  @property
  def arrays(self) -> list[jax.Array]:
    """The arrays of all operands."""
    return [each.array for each in self.functions.operands]

  @property
  def padded_lengths(self) -> tuple[int, int]:
    """T and S, rounded up to tiles."""
    rows, columns = self.visibility.tiles.shape
    return rows * self.tile[0], columns * self.tile[1]

  def finite(self, tokens: jax.Array) -> jax.Array:
    """Zero for NaN and infinity, if keys may be hidden."""
    if not self.is_masked:
      return tokens
    wide = tokens.astype(jnp.promote_types(tokens.dtype, jnp.float32))
    return jnp.where(jnp.isfinite(wide), wide, 0.0).astype(tokens.dtype)

  def forward(
    self, operands: Sequence[jax.Array], query, key, value
  ) -> tuple[jax.Array, Statistics]:
    """The context, in the query's dtype, and the statistics."""
    size = value.shape[-1]
    grid = TileGrid(self, self.visibility.by_rows(), ())
    lengths = self.padded_lengths
    outputs = [
      grid.tokens((*self.leading, lengths[0], size), 0),
      grid.statistics(lengths[0]),
      grid.statistics(lengths[0]),
    ]
    queries = self.tile[0]
    context, maximum, total = grid.call(
      functools.partial(_forward, self),
      inputs_of(self, grid, operands, query, key, value),
      outputs,
      [query.dtype, self.dtype, self.dtype],
      [(queries, 1), (queries, 1), (queries, size), (queries, 2)],
    )
    return context, Statistics(maximum[..., 0, :], total[..., 0, :])

  def rows(
    self, context, statistics, of_context, of_total
  ) -> dict[str, jax.Array]:
    """What the kernels of gradients read of rows."""
    return rows_of_gradients(
      context,
      statistics,
      of_context,
      of_total,
      dtype=self.dtype,
      is_masked=self.is_masked,
    )

  def gradient_of_queries(
    self, operands, tokens, rows, wanted: Sequence[int]
  ) -> tuple[jax.Array, list[jax.Array], dict[str, jax.Array]]:
    """The gradients of queries and of wanted operands of the score; `rows`."""
    # The gradients have all leading axes of the context.
    query = tokens[0]
    grid = TileGrid(self, self.visibility.by_rows(), ())
    cores = [core_2d(self.score_operands[n]) for n in wanted]
    shape = (*self.leading, *query.shape[-2:])
    gradient, *of_operands = grid.call(
      functools.partial(_gradient_of_queries, self, wanted),
      inputs_of(self, grid, operands, *tokens) + row_inputs(self, grid, rows),
      [grid.tokens(shape, 0), *(grid.whole(core) for core in cores)],
      [_sum_dtype(self, query)] + [self.dtype] * len(cores),
      [(self.tile[0], query.shape[-1])],
    )
    parts = [
      each[..., 0, 0] if not core else each.reshape(*self.leading, *core)
      for each, core in zip(
        of_operands, (self.score_operands[n].core for n in wanted)
      )
    ]
    return gradient, parts, rows

  def gradient_of_keys(
    self, operands, tokens, rows
  ) -> tuple[jax.Array, jax.Array]:
    """The gradients of the keys and the values."""
    # They have the leading axes of the context, of size 1 where neither keys
    # nor values have the axis.
    _, key, value = tokens
    shared = tuple(
      axis
      for axis, size in enumerate(self.leading)
      if size > 1 and key.shape[axis] == value.shape[axis] == 1
    )
    groups = math.prod(self.leading[axis] for axis in shared)
    grid = TileGrid(self, self.visibility.by_columns(groups), shared)
    leading = [
      1 if axis in shared else n for axis, n in enumerate(self.leading)
    ]
    shapes = [(*leading, *each.shape[-2:]) for each in (key, value)]
    of_key, of_value = grid.call(
      functools.partial(_gradient_of_keys, self),
      inputs_of(self, grid, operands, *tokens) + row_inputs(self, grid, rows),
      [grid.tokens(shape, 1) for shape in shapes],
      [_sum_dtype(self, each, leading) for each in (key, value)],
      [(self.tile[1], each.shape[-1]) for each in (key, value)],
    )
    return of_key, of_value


def _forward(problem, visit, inputs, outputs, scratch):
  """One visit of a tile: the online softmax."""
  query_ref, key_ref, value_ref, *operand_refs = inputs
  maximum, total, summed, spoilt = scratch

  @pl.when(visit.has(FIRST))
  def _():
    spoilt[...] = jnp.zeros_like(spoilt)
    maximum[...] = jnp.full_like(maximum, jnp.finfo(problem.dtype).min)
    total[...] = jnp.zeros_like(total)
    summed[...] = jnp.zeros_like(summed)

  def update(masked):
    key, value = (problem.finite(ref[...]) for ref in (key_ref, value_ref))
    parts = visit.parts(problem, operand_refs)
    for rows in visit.chunks(problem):
      query = problem.finite(query_ref[rows, :])
      scores, _ = visit.scores(problem, query, key, parts, rows, masked)
      if problem.is_masked:
        _note_non_finite(scores, key_ref[...], value_ref[...], spoilt, rows)
      before = maximum[rows, :]
      after = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
      shrink = jnp.exp(before - after)
      weights = jnp.exp(scores - after)
      maximum[rows, :] = after
      total[rows, :] = total[rows, :] * shrink + jnp.sum(
        weights, axis=-1, keepdims=True
      )
      types = (value.dtype, value.dtype)
      product = matrix_product(weights, value, (1, 0), types, problem.precision)
      summed[rows, :] = summed[rows, :] * shrink + product

  visit.either(problem, update)

  @pl.when(visit.has(LAST))
  def _():
    context_ref, maximum_ref, total_ref = outputs
    divisor = jnp.where(total[...] == 0.0, 1.0, total[...])
    context, rows = summed[...] / divisor, [maximum[...], total[...]]
    if problem.is_masked:
      bad = _has_non_finite(query_ref[...]) * (total[...] != 0.0)
      of_rows = jnp.maximum(spoilt[:, :1], bad)
      rows = [jnp.where(of_rows > 0.0, jnp.nan, each) for each in rows]
      of_context = jnp.maximum(spoilt[:, 1:], of_rows)
      context = jnp.where(of_context > 0.0, jnp.nan, context)
    context_ref[...] = context.astype(context_ref.dtype)
    maximum_ref[...], total_ref[...] = map(as_row, rows)


def _note_non_finite(scores, key, value, spoilt, rows):
  """Marks rows that attend to keys or values with NaN or infinity."""
  bad = [_has_non_finite(each) for each in (key, value)]

  @pl.when(jnp.max(jnp.maximum(*bad)) > 0.0)
  def _():
    visible = jnp.where(jnp.isneginf(scores), 0.0, 1.0)
    seen = [
      jnp.max(visible * as_row(each), axis=-1, keepdims=True) for each in bad
    ]
    spoilt[rows, :] = jnp.maximum(
      spoilt[rows, :], jnp.concatenate(seen, axis=-1)
    )


def _has_non_finite(tokens: jax.Array) -> jax.Array:
  """1 for tokens [n, D] with NaN or infinity and 0 for others, [n, 1]."""
  dtype = jnp.promote_types(tokens.dtype, jnp.float32)
  bad = jnp.where(jnp.isfinite(tokens.astype(dtype)), 0.0, 1.0).astype(dtype)
  return jnp.max(bad, axis=-1, keepdims=True)


def _gradient_of_queries(problem, wanted, visit, inputs, outputs, scratch):
  """One visit of a tile of keys."""
  query_ref, key_ref, value_ref, *rest = inputs
  operand_refs, row_refs = rest[:-4], rest[-4:]
  summed = scratch[0]
  gradient_ref, *of_operands = outputs

  @pl.when(visit.has(FIRST))
  def _():
    summed[...] = jnp.zeros_like(summed)

  @pl.when(visit.number == 0)
  def _():
    for each in of_operands:
      each[...] = jnp.zeros_like(each)

  def update(masked):
    key, value = (problem.finite(ref[...]) for ref in (key_ref, value_ref))
    parts = visit.parts(problem, operand_refs)
    of_rows = visit.rows(problem, row_refs)
    for rows in visit.chunks(problem):
      query = problem.finite(query_ref[rows, :])
      scores, pull_back = visit.scores(
        problem, query, key, parts, rows, masked, wanted=wanted
      )
      _, of_scores, _ = visit.weights(problem, scores, value, of_rows, rows)
      of_query, of_parts = pull_back(of_scores)
      summed[rows, :] += of_query
      for each, part in zip(of_operands, of_parts):
        each[...] += jnp.broadcast_to(
          part.reshape(part.shape if part.ndim > 1 else (1, -1)), each.shape
        )

  visit.either(problem, update)

  @pl.when(visit.has(LAST))
  def _():
    gradient_ref[...] = summed[...].astype(gradient_ref.dtype)


def _gradient_of_keys(problem, visit, inputs, outputs, scratch):
  """One visit of a tile of queries."""
  query_ref, key_ref, value_ref, *rest = inputs
  operand_refs, row_refs = rest[:-4], rest[-4:]

  @pl.when(visit.has(FIRST))
  def _():
    for each in scratch:
      each[...] = jnp.zeros_like(each)

  def update(masked):
    key, value = (problem.finite(ref[...]) for ref in (key_ref, value_ref))
    parts = visit.parts(problem, operand_refs)
    of_rows = visit.rows(problem, row_refs)
    for rows in visit.chunks(problem):
      query = problem.finite(query_ref[rows, :])
      scores, pull_back = visit.scores(
        problem, query, key, parts, rows, masked, of_keys=True
      )
      weights, of_scores, cotangent = visit.weights(
        problem, scores, value, of_rows, rows
      )
      types = (value.dtype, value.dtype)
      scratch[0][...] += pull_back(of_scores)[0]
      scratch[1][...] += matrix_product(
        weights, cotangent, (0, 0), types, problem.precision
      )

  visit.either(problem, update)

  @pl.when(visit.has(LAST))
  def _():
    for output, each in zip(outputs, scratch):
      output[...] = each[...].astype(output.dtype)


def _sum_dtype(problem, tokens, leading=None):
  """The dtype of a gradient; that of sums if it is summed over leading axes."""
  leading = problem.leading if leading is None else tuple(leading)
  return tokens.dtype if tokens.shape[:-2] == leading else problem.dtype
