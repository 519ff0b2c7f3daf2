"""One visit of the forward kernel of entmax and sparsemax for TPUs.

The kernel visits the tiles of a row twice. In the first phase it computes the
scores and keeps them, and at the end finds the peaks, see `Sparse`. In the
second it adds the values: their sum by weights and, for gradients, their mean
by the derivatives of the weights.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.normalizers import MOST_STEPS, STEP
from attention.implementations.pallas.tpu.forward import (
  has_non_finite,
  note_non_finite,
)
from attention.implementations.pallas.tpu.tokens import read, write
from attention.implementations.pallas.tpu.visit import as_row
from attention.implementations.pallas.visits import LAST


def sparse_context(
  problem: Any,
  visit: Any,
  inputs: Sequence[Any],
  outputs: Sequence[Any],
  scratch: Sequence[Any],
) -> None:
  """Adds a tile of keys to the scores of the queries, or to their contexts."""
  query_ref, key_ref, value_ref, *operand_refs = inputs
  scores_ref, place, peak, total, spoilt, *sum_refs = scratch
  is_first_phase = visit.groups[visit.number] == 0

  @pl.when(visit.starts(is_shared=False))
  def _():
    place[0] = 0

  @pl.when(visit.starts(is_shared=False) & is_first_phase)
  def _():
    spoilt[...] = jnp.zeros_like(spoilt)
    peak[...] = jnp.full_like(peak, jnp.finfo(problem.dtype).min)

  def add_scores(masked):
    key, value = read(key_ref), read(value_ref)
    query, finite_key = problem.finite(read(query_ref)), problem.finite(key)
    parts = visit.parts(problem, operand_refs)
    for rows in visit.chunks(problem):
      scores, _ = visit.scores(
        problem, query[rows, :], finite_key, parts, rows, masked
      )
      if problem.is_masked:
        note_non_finite(scores, key, value, spoilt, rows)
      scores_ref[place[0], rows, :] = scores
      highest = jnp.max(scores, axis=-1, keepdims=True)
      peak[rows, :] = jnp.maximum(peak[rows, :], highest)

  def add_values(masked):
    del masked
    value = problem.finite(read(value_ref))
    parts = visit.parts(problem, operand_refs)
    for rows in visit.chunks(problem):
      scores = scores_ref[place[0], rows, :]
      own = peak[rows, :]
      weights = problem.normalizer.weights(scores, own)
      slopes = problem.normalizer.slopes(scores, own)
      total[rows, :] += jnp.sum(slopes, axis=-1, keepdims=True)
      for sums, numbers in zip(sum_refs, (weights, slopes)):
        kept = visit.dropped(problem, numbers, parts, rows)
        sums[rows, :] += problem.product(kept, value, (1, 0), value.dtype)

  def update(masked):
    pl.when(is_first_phase)(lambda: add_scores(masked))
    pl.when(~is_first_phase)(lambda: add_values(masked))
    place[0] += 1

  visit.either(problem, update)

  @pl.when(visit.ends(is_shared=False) & is_first_phase)
  def _():
    has_keys = peak[...] > jnp.finfo(problem.dtype).min
    peak[...] = jnp.where(has_keys, peak[...], 0.0)
    _find_peaks(problem, scores_ref, place[0], peak)
    for each in (total, *sum_refs):
      each[...] = jnp.zeros_like(each)

  @pl.when(visit.has(LAST))
  def _():
    has_keys = jnp.where(total[...] == 0.0, 0.0, 1.0)
    divisor = jnp.where(total[...] == 0.0, 1.0, total[...])
    results = [each[...] for each in sum_refs]
    results[1:] = [each / divisor for each in results[1:]]
    rows = [peak[...], has_keys]
    if problem.is_masked:
      bad = has_non_finite(read(query_ref)) * has_keys
      of_rows = jnp.maximum(spoilt[:, :1], bad)
      of_results = jnp.maximum(spoilt[:, 1:], of_rows)
      rows = [jnp.where(of_rows > 0.0, jnp.nan, each) for each in rows]
      results = [jnp.where(of_results > 0.0, jnp.nan, x) for x in results]
    *token_refs, peak_ref, total_ref = outputs
    for ref, tokens in zip(token_refs, results):
      write(ref, tokens)
    peak_ref[...], total_ref[...] = map(as_row, rows)


def _find_peaks(problem: Any, scores_ref: Any, count: jax.Array, peak: Any):
  """Moves maxima to the peaks, for the scores of `count` tiles."""
  normalizer = problem.normalizer

  def add(number, sums):
    scores, own = scores_ref[number], peak[...]
    terms = normalizer.weights(scores, own), normalizer.slopes(scores, own)
    return [
      before + jnp.sum(each, axis=-1, keepdims=True)
      for before, each in zip(sums, terms)
    ]

  def advance(state):
    zeros = jnp.zeros_like(peak)
    sums = jax.lax.fori_loop(0, count, add, [zeros, zeros])
    step = normalizer.step(*sums)
    peak[...] += step
    return jnp.max(step), state[1] + 1

  jax.lax.while_loop(
    lambda state: (state[0] > STEP) & (state[1] < MOST_STEPS),
    advance,
    (jnp.asarray(jnp.inf, problem.dtype), jnp.int32(0)),
  )
