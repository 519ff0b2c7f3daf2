"""One visit of the forward kernel of entmax and sparsemax for TPUs.

The kernel visits the tiles of a row twice. In the first phase it computes the
scores and keeps them, and at the end finds the peaks, see `Sparse`. In the
second it adds the values: their sum by weights and, for gradients, their mean
by the derivatives of the weights.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.normalizers import MOST_STEPS, STEP
from attention.implementations.pallas.tpu.forward import flag_rows, with_nan
from attention.implementations.pallas.tpu.tokens import read, write
from attention.implementations.pallas.tpu.visit import as_row
from attention.implementations.pallas.visits import LAST


class _Scratch(NamedTuple):
  """What a row of tiles keeps in on-chip memory."""

  scores: Any  # [n, t, s] of the visited tiles
  place: Any  # of the next tile among them
  peak: Any  # [t, 1], the maximum in the first phase
  total: Any  # [t, 1] of the derivatives of weights
  row_flags: Any  # [t, 2], see `forward.flag_rows`
  sums: Sequence[Any]  # [t, E] of values by weights, and by their derivatives


def sparse_context(visit, inputs, outputs, scratch):
  """Adds a tile of keys to the scores of the queries, or to their contexts."""
  problem = visit.problem
  scores, place, peak, total, row_flags, *sums = scratch
  held = _Scratch(scores, place, peak, total, row_flags, sums)
  is_first_phase = visit.groups[visit.number] == 0

  @pl.when(visit.starts(is_shared=False))
  def _():
    held.place[0] = 0

  @pl.when(visit.starts(is_shared=False) & is_first_phase)
  def _():
    held.row_flags[...] = jnp.zeros_like(held.row_flags)
    held.peak[...] = jnp.full_like(held.peak, jnp.finfo(problem.dtype).min)

  def update(masked):
    pl.when(is_first_phase)(lambda: _add_scores(visit, inputs, held, masked))
    pl.when(~is_first_phase)(lambda: _add_values(visit, inputs, held))
    held.place[0] += 1

  visit.either(update)

  @pl.when(visit.ends(is_shared=False) & is_first_phase)
  def _():
    _find_peaks(problem, held)
    for each in (held.total, *held.sums):
      each[...] = jnp.zeros_like(each)

  pl.when(visit.has(LAST))(lambda: _write(problem, inputs[0], outputs, held))


def _add_scores(visit, inputs, held: _Scratch, masked: bool) -> None:
  """Keeps the scores of a tile, and their maxima."""
  problem = visit.problem
  query_ref, key_ref, value_ref, *operand_refs = inputs
  key, value = read(key_ref), read(value_ref)
  query, finite_key = problem.finite(read(query_ref)), problem.finite(key)
  parts = visit.parts(operand_refs)
  for rows in visit.chunks():
    scores, _ = visit.scores(query[rows, :], finite_key, parts, rows, masked)
    if problem.is_masked:
      flag_rows(scores, key, value, held.row_flags, rows)
    held.scores[held.place[0], rows, :] = scores
    highest = jnp.max(scores, axis=-1, keepdims=True)
    held.peak[rows, :] = jnp.maximum(held.peak[rows, :], highest)


def _add_values(visit, inputs, held: _Scratch) -> None:
  """Adds the values of a tile, by weights and by their derivatives."""
  problem = visit.problem
  _, _, value_ref, *operand_refs = inputs
  value = problem.finite(read(value_ref))
  parts = visit.parts(operand_refs)
  for rows in visit.chunks():
    scores, peak = held.scores[held.place[0], rows, :], held.peak[rows, :]
    weights = problem.normalizer.weights(scores, peak)
    slopes = problem.normalizer.slopes(scores, peak)
    held.total[rows, :] += jnp.sum(slopes, axis=-1, keepdims=True)
    for sums, numbers in zip(held.sums, (weights, slopes)):
      kept = visit.dropped(numbers, parts, rows)
      sums[rows, :] += problem.product(kept, value, (1, 0), value.dtype)


def _write(problem, query_ref, outputs, held: _Scratch) -> None:
  """Writes the sums, and the statistics of the rows."""
  total = held.total[...]
  has_keys = jnp.where(total == 0.0, 0.0, 1.0)
  results = [each[...] for each in held.sums]
  results[1:] = [x / jnp.where(total == 0.0, 1.0, total) for x in results[1:]]
  rows = [held.peak[...], has_keys]
  if problem.is_masked:
    rows, results = with_nan(query_ref, held.row_flags, has_keys, rows, results)
  *token_refs, peak_ref, total_ref = outputs
  for ref, tokens in zip(token_refs, results):
    write(ref, tokens)
  peak_ref[...], total_ref[...] = map(as_row, rows)


def _find_peaks(problem: Any, held: _Scratch) -> None:
  """Moves maxima to the peaks, for the scores of all visited tiles."""
  normalizer, peak, count = problem.normalizer, held.peak, held.place[0]
  has_keys = peak[...] > jnp.finfo(problem.dtype).min
  peak[...] = jnp.where(has_keys, peak[...], 0.0)

  def add(number, sums):
    scores, own = held.scores[number], peak[...]
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
