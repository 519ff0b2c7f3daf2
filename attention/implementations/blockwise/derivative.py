"""The one rule for all derivatives.

With S the scores and bias, N = n(S) the numerators and L = sum_j p(S) the sum
of a row (for softmax, n and p are the exponential), the context is
O = (N / L) V and the tangents are

    dL / L = sum_j dp / L
    dO     = sum_j (dn / L) V + sum_j (N / L) dV - (dL / L) O

where dn and dp are the tangents of n and p on a tile, for any score. Every term
is a sum over tiles, linear in the tangents, with N recomputed from the tile and
the statistics of the rows.
JAX can therefore transpose the rule, and reverse mode equals the backward pass
of "FlashAttention", Dao et al., 2022 (https://arxiv.org/abs/2205.14135). The
rule is ordinary JAX code, so it can be differentiated again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from attention.arrays import axes
from attention.arrays.matmul import (
  matmul_precision,
  weighted_sum_columns_of_tangents,
  weighted_sum_of_tangents,
)
from attention.arrays.softmax import Statistics
from attention.implementations.blockwise.online_softmax import (
  context_and_statistics,
)
from attention.implementations.blockwise.problem import Captured, Problem
from attention.implementations.blockwise.tiles import (
  add,
  cut,
  cut_columns,
  scan,
)
from attention.request import Combined
from attention.transforms.custom_transpose import jvp_of_active


def differentiable_context(
  problem: Problem,
  captured: Captured,
  *tokens: jax.Array,
  combined: Combined | None = None,
) -> tuple[jax.Array, Statistics]:
  """`context_and_statistics`, differentiable by the rule to any order."""
  # With `combined`, the result over all key shards, it returns that, with this
  # shard's terms of the tangents in place of those of `combined`. Derivatives
  # of the terms include those by `combined`.

  @jax.custom_jvp
  def primal(combined, captured, *tokens):
    return combined or context_and_statistics(problem, captured, *tokens)

  @functools.partial(primal.defjvp, symbolic_zeros=True)
  def rule(primals, tangents):
    with matmul_precision(problem.precision):
      outputs = primals[0] or primal(*primals)
      return outputs, _tangents(problem, primals[1:], outputs, tangents[1:])

  return primal(combined, captured, *tokens)


class _Linear(NamedTuple):
  """The tangents; None where they are zero."""

  # Keys and values are transposed, [..., D, S]: in reverse mode their sums over
  # tiles of queries are then written contiguously.

  captured: tuple[list[jax.Array | None], list[jax.Array | None]]
  query: jax.Array | None
  key_columns: jax.Array | None
  value_columns: jax.Array | None


def _tangents(problem: Problem, primals, outputs, tangents):
  """The tangents of the context and the statistics."""
  tiling = problem.tiling
  context, statistics = outputs
  # Sums over tiles are taken in the statistics' dtype.
  captured, query, key, value = jax.tree.map(
    functools.partial(_widened, dtype=problem.dtype),
    ((tangents[0].pair, tangents[0].bias), *tangents[1:]),
    is_leaf=lambda tangent: isinstance(tangent, SymbolicZero),
  )
  linear = _Linear(captured, query, _in_columns(key), _in_columns(value))
  of_scores = bool(jax.tree.leaves((captured, query, key)))

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def visit(linear, start):
    return _tile_terms(problem, primals, statistics, linear, start)

  def step(sums, start):
    *row, column = start
    terms = visit(linear, (*row, column))
    starts = (row, row, (*row[:-1], 0, row[-1]))
    return [
      total if total is None else add(total, term, start)
      for total, term, start in zip(sums, terms, starts)
    ]

  context_zeros, row_zeros = problem.zeros(primals, context.shape[-1])
  sums = [
    row_zeros if of_scores else None,
    context_zeros if of_scores else None,
    None if value is None else _in_columns(context_zeros),
  ]
  of_total, by_scores, by_values = scan(step, sums, tiling.visible_tiles())
  terms = [by_scores, _in_columns(by_values)]
  if of_total is None:
    of_total = row_zeros
  else:
    terms.append(-of_total[..., None] * context)
  context_tangent = sum(term for term in terms if term is not None)
  return context_tangent, statistics.tangent(of_total)


def _tile_terms(problem, primals, statistics, linear, start):
  """One tile's terms of the three sums; the last one is transposed."""
  tiling = problem.tiling
  captured, query, *others = primals
  *row, column = start
  query, rows, query_tangent = jax.tree.map(
    lambda each: cut(each, row, tiling.row), (query, statistics, linear.query)
  )
  key_start = (*row[:-1], column)
  tiles = query, *(cut(each, key_start, tiling.column) for each in others)
  columns = jax.tree.map(
    lambda each: cut_columns(tiling, each, start),
    (linear.key_columns, linear.value_columns),
  )
  tangents = _Linear(linear.captured, query_tangent, *columns)
  terms = functools.partial(
    _terms_of_tiles, problem, captured, tiles, rows, start
  )
  if problem.occupied is None:
    return terms(tangents)
  zero = axes.varying_zero(primals, problem.dtype)
  shapes = jax.eval_shape(terms, tangents)
  return jax.lax.cond(
    problem.occupied(captured.occupied, start),
    terms,
    lambda _: jax.tree.map(
      lambda each: jnp.broadcast_to(zero.astype(each.dtype), each.shape), shapes
    ),
    tangents,
  )


def _terms_of_tiles(problem, captured, tiles, rows, start, linear):
  """`_tile_terms` for tiles that are cut."""
  tiling, dtype = problem.tiling, problem.dtype
  query_tile, key_tile, value_tile = tiles

  def parts_of(of_pair, *tiles):
    pair, bias = of_pair
    changed = captured._replace(pair=pair, bias=bias)
    masked = tiling.has_partial
    scores = problem.scores(changed, *tiles, start, masked=masked)
    maximum = jax.lax.stop_gradient(rows.maximum)[..., None]
    return problem.normalizer.terms(scores, maximum)

  (numerators, _), tangents = _jvp(
    parts_of,
    ((captured.pair, captured.bias), query_tile, key_tile),
    (linear.captured, linear.query, _in_columns(linear.key_columns)),
  )

  # Rows of the results are divided by L, instead of numerators.
  inverse = rows.inverse
  of_total = by_scores = by_values = None
  if tangents is not None:
    of_numerators, of_parts = tangents
    of_total = inverse * jnp.sum(of_parts, axis=-1)
    kept = problem.dropped(captured, of_numerators, start)
    by_scores = weighted_sum_of_tangents(kept, value_tile, dtype, value_tile)
    by_scores = inverse[..., None] * by_scores
  if linear.value_columns is not None:
    kept = problem.dropped(captured, numerators, start)
    by_values = weighted_sum_columns_of_tangents(
      kept, linear.value_columns, dtype, value_tile
    )
    by_values = inverse[..., None, :] * by_values
  return of_total, by_scores, by_values


def _jvp(function, primals, tangents) -> Any:
  """`jax.jvp` with None for zero tangents, of arguments and of the result."""
  leaves, structure = jax.tree.flatten(primals)
  tangents = jax.tree.leaves(tangents, is_leaf=lambda each: each is None)
  if all(each is None for each in tangents):
    return function(*primals), None
  return jvp_of_active(
    lambda *leaves: function(*jax.tree.unflatten(structure, leaves)),
    leaves,
    [
      each if each is None else each.astype(x.dtype)
      for each, x in zip(tangents, leaves)
    ],
  )


def _widened(tangent: Any, dtype: Any) -> jax.Array | None:
  """A tangent in `dtype` at least, None for zero."""
  if isinstance(tangent, SymbolicZero):
    return None
  return tangent.astype(jnp.promote_types(tangent.dtype, dtype))


def _in_columns(array: jax.Array | None) -> jax.Array | None:
  return None if array is None else jnp.swapaxes(array, -1, -2)
