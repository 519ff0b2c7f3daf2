"""A block of the forward kernel for Hopper GPUs: 64 queries."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.attempts import (
  attempts,
  make_finite,
  not_finite,
  when,
)
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.scores import (
  distances,
  normalization,
  own_tokens,
  predictions,
  rotations,
)
from attention.implementations.pallas.hopper.scores.tile import (
  TileScores,
  of_visible,
  tile_scores,
)
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  BY_ROW,
  SIDE,
  TILE,
  Axes,
  across,
  down,
)


def block_of_queries(block: Block, *, compute: Callable) -> None:
  """Computes the context and the statistics of the queries.

  compute(block, flag_refs, is_second) writes results, and returns 1 for queries
  whose sums are not finite.
  """
  own_tokens.map_own(block)
  predictions.predict_own(block)
  distances.prepare_own(block)
  rotations.prepare(block)
  if block.problem.channels is not None:
    block.problem.channels.prepare(block, of_own=True)

  def run(*flag_refs):
    attempts(block.problem, functools.partial(compute, block, flag_refs))

  if block.problem.is_masked:
    # Flags of keys whose values have NaN or infinity, and of the queries that
    # attend to them.
    flag_refs = plgpu.SMEM((SIDE,), jnp.float32)
    pl.run_scoped(run, flag_refs, flag_refs)
  else:
    run()


def online_softmax(
  block: Block, flag_refs: Sequence[Any], is_second: Any
) -> jax.Array:
  """See `block_of_queries`."""
  block = block.with_new_addresses()
  shape, zeros = block.results["context"].shape, block.problem.zeros()
  sums = block.problem.zeros(shape)
  if flag_refs:
    flag_refs[1][...] = zeros

  def visit(block, starts, state):
    @when(is_second)
    def _():
      clean_values(block, starts, *flag_refs)

    with_nan = is_second is not None
    tile = tile_scores(block, starts, with_nan=with_nan)
    return _add_keys(block, tile, *state)

  state = sums, zeros + normalization.LOWEST, zeros
  summed, maximum, total = block.visits(visit, state)
  maximum, total = normalization.rows(block.problem, maximum, total)
  context = summed / across(jnp.where(total == 0.0, 1.0, total), shape)
  context = write_tokens(block, flag_refs, "context", context)
  write_statistics(block, maximum, total)
  return not_finite(block.problem, [context] if flag_refs else [])


def write_tokens(
  block: Block, flag_refs: Sequence[Any], name: str, tokens: jax.Array
) -> jax.Array:
  """Writes the result of a name, NaN for flagged queries, and returns it."""
  if flag_refs:
    is_flagged = block.problem.cast(flag_refs[1][...], BY_ROW) > 0.0
    tokens = jnp.where(across(is_flagged, tokens.shape), jnp.nan, tokens)
  block.results[name][...] = tokens.astype(block.results[name].dtype)
  return tokens


def write_statistics(
  block: Block, maximum: jax.Array, total: jax.Array
) -> None:
  """Writes the statistics; a row is NaN if its total is."""
  if block.problem.is_masked:
    maximum = jnp.where(jnp.isnan(total), jnp.nan, maximum)
  block.results["maximum"][...] = maximum
  block.results["total"][...] = total


def _add_keys(
  block: Block, tile: TileScores, summed, maximum, total
) -> tuple[Any, ...]:
  """Adds a tile of keys to the sums of the queries."""
  (factor,) = block.factors
  numerators, parts, shrink, after = normalization.added(
    block.problem, tile.scores, maximum
  )
  total = total * shrink + jnp.sum(parts, axis=1)
  factor[...] = tile.with_dropout(numerators).astype(factor.dtype)
  plgpu.commit_smem()
  product = product_with_values(block)
  return summed * across(shrink, summed.shape) + product, after, total


def product_with_values(block: Block) -> jax.Array:
  """The sums of the tile of values by the numbers in shared memory."""
  (factor,), value = block.factors, block.tiles["value"]
  return block.problem.products((SIDE, value.shape[-1]), [(factor, value)])


def clean_values(
  block: Block, starts: Sequence[Any], of_keys: Any, of_queries: Any
) -> None:
  """Replaces NaN and infinity, and flags the queries that attend to them."""
  cast = block.problem.cast
  of_keys[...] = make_finite(block.problem, block.tiles["value"], Axes.TOKENS)
  plgpu.commit_smem()
  flags = down(cast(of_keys[...], BY_COLUMN), TILE)
  seen = jnp.max(of_visible(block, starts, flags), axis=1)
  of_queries[...] = jnp.maximum(cast(of_queries[...], BY_ROW), seen)
