"""One visit of the forward kernel for TPUs."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.tpu import normalization
from attention.implementations.pallas.tpu.tokens import read, write
from attention.implementations.pallas.tpu.visit import as_row
from attention.implementations.pallas.visits import FIRST, LAST
from attention.normalizers import is_softmax


def online_softmax(visit, inputs, outputs, scratch):
  """Adds a tile of keys to the sums of the queries."""
  problem = visit.problem
  query_ref, key_ref, value_ref, *operand_refs = inputs
  maximum, total, row_flags, summed = scratch

  @pl.when(visit.has(FIRST))
  def _():
    row_flags[...] = jnp.zeros_like(row_flags)
    maximum[...] = jnp.full_like(maximum, jnp.finfo(problem.dtype).min)
    total[...] = jnp.zeros_like(total)
    summed[...] = jnp.zeros_like(summed)

  def update(masked):
    key, value = read(key_ref), read(value_ref)
    query = problem.finite(read(query_ref))
    finite_key, finite_value = map(problem.finite, (key, value))
    parts = visit.parts(operand_refs)
    for rows in visit.chunks():
      scores, _ = visit.scores(query[rows, :], finite_key, parts, rows, masked)
      exponents = problem.normalizer.exponents(scores)
      if problem.is_masked:
        flag_rows(exponents, key, value, row_flags, rows)
      before = maximum[rows, :]
      after = jnp.maximum(before, jnp.max(exponents, axis=-1, keepdims=True))
      maximum[rows, :] = after
      before, after = (
        normalization.bounded(problem, each) for each in (before, after)
      )
      shrink = jnp.exp(before - after)
      numerators, parts_of_sum = normalization.terms(problem, scores, after)
      total[rows, :] = total[rows, :] * shrink + jnp.sum(
        parts_of_sum, axis=-1, keepdims=True
      )
      kept = visit.dropped(numerators, parts, rows)
      product = problem.product(kept, finite_value, (1, 0), value.dtype)
      summed[rows, :] = summed[rows, :] * shrink + product

  visit.either(update)

  @pl.when(visit.has(LAST))
  def _():
    _write(problem, query_ref, outputs, scratch)


def _write(problem, query_ref, outputs, scratch) -> None:
  """Writes the contexts and the statistics of the queries."""
  context_ref, maximum_ref, total_ref = outputs
  maximum, total, row_flags, summed = scratch
  rows = [
    normalization.bounded(problem, maximum[...]),
    total[...] + problem.normalizer.epsilon,
  ]
  divisor = jnp.where(rows[1] == 0.0, 1.0, rows[1])
  context = summed[...] / divisor
  if problem.is_masked:
    has_keys = total[...] != 0.0
    if not is_softmax(problem.normalizer):  # the total may be 0
      has_keys |= maximum[...] > jnp.finfo(problem.dtype).min
    rows, (context,) = with_nan(query_ref, row_flags, has_keys, rows, [context])
  write(context_ref, context)
  maximum_ref[...], total_ref[...] = map(as_row, rows)


def flag_rows(exponents, key, value, row_flags, rows) -> None:
  """Flags rows that attend to keys or values with NaN or infinity."""
  flags = [_flags(each) for each in (key, value)]

  @pl.when(jnp.max(jnp.maximum(*flags)) > 0.0)
  def _():
    visible = jnp.where(jnp.isneginf(exponents), 0.0, 1.0)
    seen = [
      jnp.max(visible * as_row(each), axis=-1, keepdims=True) for each in flags
    ]
    row_flags[rows, :] = jnp.maximum(
      row_flags[rows, :], jnp.concatenate(seen, axis=-1)
    )


def with_nan(query_ref, row_flags, has_keys, rows, contexts):
  """Numbers [t, 1] of rows and contexts, NaN where `row_flags` say so.

  A query with NaN or infinity makes its row NaN if that attends to a key.
  """
  of_rows = jnp.maximum(row_flags[:, :1], _flags(read(query_ref)) * has_keys)
  of_contexts = jnp.maximum(row_flags[:, 1:], of_rows)
  return (
    [jnp.where(of_rows > 0.0, jnp.nan, each) for each in rows],
    [jnp.where(of_contexts > 0.0, jnp.nan, each) for each in contexts],
  )


def _flags(tokens: jax.Array) -> jax.Array:
  """1 for tokens [n, D] with NaN or infinity and 0 for others, [n, 1]."""
  dtype = jnp.promote_types(tokens.dtype, jnp.float32)
  flags = jnp.where(jnp.isfinite(tokens.astype(dtype)), 0.0, 1.0).astype(dtype)
  return jnp.max(flags, axis=-1, keepdims=True)
