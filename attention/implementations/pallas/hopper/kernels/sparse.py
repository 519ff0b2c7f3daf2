"""A block of the forward kernel of entmax and sparsemax: 64 queries.

A block visits its tiles in several rounds and computes their scores in each:
first for the maxima of rows, then for the steps of Newton's method to the
peaks, see `Sparse`, and then for the sums of values by weights and, for
gradients, by the derivatives of weights.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.attempts import (
  not_finite,
  when,
)
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.kernels.forward import (
  clean_values,
  product_with_values,
  write_statistics,
  write_tokens,
)
from attention.implementations.pallas.hopper.scores.normalization import LOWEST
from attention.implementations.pallas.hopper.scores.tile import (
  TileScores,
  tile_scores,
)
from attention.implementations.pallas.hopper.tiles.layout import TILE, across
from attention.implementations.pallas.normalizers import MOST_STEPS, STEP

# The kinds of rounds, in order.
_MAXIMA, _PEAKS, _CONTEXT, _MEANS, _END = range(5)


def sparse_context(
  block: Block, flag_refs: Sequence[Any], is_second: Any
) -> jax.Array:
  """See `block_of_queries`."""
  # All rounds are one loop: the compiler would share what several loops have in
  # common, and registers are scarce.
  block = block.with_new_addresses()
  zeros = block.problem.zeros()
  if flag_refs:
    flag_refs[1][...] = zeros

  def compute_round(state):
    kind, steps, peak, flags = state

    def visit(block, starts, sums):
      @when(None if is_second is None else is_second & (kind >= _CONTEXT))
      def _():
        clean_values(block, starts, *flag_refs)

      tile = tile_scores(block, starts, with_nan=is_second is not None)
      return _added(block, tile, kind, peak, *sums)

    shape = block.results["context"].shape
    of_values = block.problem.zeros(shape)
    start = zeros + jnp.where(kind == _MAXIMA, LOWEST, 0.0)
    sums = block.visits(visit, (start, zeros, of_values))
    flags = _write(block, flag_refs, kind, peak, flags, sums)
    first, second, _ = sums
    step = block.problem.sparse.step(first, second)
    is_last = (jnp.max(step, axis=0) <= STEP) | (steps == MOST_STEPS)
    moved = jnp.where(first > LOWEST, first, 0.0)
    moved = jnp.where(kind == _PEAKS, peak + step, moved)
    peak = jnp.where(kind < _CONTEXT, moved, peak)
    is_over = (kind != _PEAKS) | is_last
    return kind + jnp.where(is_over, 1, 0), steps + 1, peak, flags

  end = _END if "means" in block.results else _MEANS
  start = jnp.int32(_MAXIMA), jnp.int32(0), zeros, zeros
  *_, flags = jax.lax.while_loop(
    lambda state: state[0] < end, compute_round, start
  )
  return flags


def _added(
  block: Block, tile: TileScores, kind: Any, peak: jax.Array, *sums: jax.Array
) -> tuple[jax.Array, ...]:
  """The sums of a round with a tile of keys added.

  They are two of rows, of which the first is the maximum in the first round,
  and one of values.
  """
  normalizer, scores = block.problem.sparse, tile.scores[0]

  def with_maximum(first, second, of_values):
    return jnp.maximum(first, jnp.max(scores, axis=1)), second, of_values

  def with_terms(first, second, of_values):
    weights, slopes = _terms(normalizer, scores, peak)
    first = first + jnp.sum(weights, axis=1)
    return first, second + jnp.sum(slopes, axis=1), of_values

  def with_values(first, second, of_values):
    weights, slopes = _terms(normalizer, scores, peak)
    numbers = jnp.where(kind == _CONTEXT, weights, slopes)
    (factor,) = block.factors
    factor[...] = tile.with_dropout(numbers).astype(factor.dtype)
    plgpu.commit_smem()
    of_values = of_values + product_with_values(block)
    return first + jnp.sum(numbers, axis=1), second, of_values

  kinds = [with_maximum, with_terms, with_values]
  return jax.lax.switch(jnp.minimum(kind, _CONTEXT), kinds, *sums)


def _terms(normalizer, scores, peak) -> tuple[jax.Array, jax.Array]:
  """The weights of a tile and their derivatives."""
  peak = across(peak, TILE)
  return normalizer.weights(scores, peak), normalizer.slopes(scores, peak)


def _write(block: Block, flag_refs, kind, peak, flags, sums) -> jax.Array:
  """Writes the results of a round; 1 for queries whose sums are not finite."""
  total, _, of_values = sums
  is_empty = total == 0.0
  context_flags = not_finite(block.problem, [of_values] if flag_refs else [])

  @pl.when(kind == _CONTEXT)
  def write_context():
    write_tokens(block, flag_refs, "context", of_values)
    has_keys = jnp.where(is_empty, 0.0, 1.0)
    write_statistics(
      block, peak, jnp.where(jnp.isnan(total), jnp.nan, has_keys)
    )

  if "means" in block.results:

    @pl.when(kind == _MEANS)
    def write_means():
      divisor = across(jnp.where(is_empty, 1.0, total), of_values.shape)
      write_tokens(block, flag_refs, "means", of_values / divisor)

  return jnp.where(kind == _CONTEXT, context_flags, flags)
