"""A block of the forward kernel for Hopper GPUs: 64 queries."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.scores import (
  LOG2_E,
  of_visible,
  tile_scores,
)
from attention.implementations.pallas.hopper.tiles import (
  BY_ROW,
  SIDE,
  TILE,
  WGMMA,
  Block,
  across,
)

_LOWEST = float(np.finfo(np.float32).min)


def online_softmax(block: Block) -> None:
  """Computes the context and the statistics of the queries."""
  if block.problem.is_masked:
    # Marks the queries that attend to values with NaN or infinity.
    spoilt = plgpu.SMEM((SIDE,), jnp.float32)
    pl.run_scoped(functools.partial(_compute, block), spoilt)
  else:
    _compute(block, None)


def _compute(block: Block, spoilt: Any) -> None:
  cast, results = block.problem.cast, block.results
  shape = results["context"].shape
  zeros = cast(jnp.zeros((SIDE,), jnp.float32), BY_ROW)
  sums = cast(jnp.zeros(shape, jnp.float32), WGMMA)
  if spoilt is not None:
    spoilt[...] = zeros

  def visit(starts, state):
    scores = tile_scores(block, starts, with_nan=spoilt is not None)[0]
    if spoilt is not None:
      _note_flags(block, starts, spoilt)
    return _add_keys(block, scores, *state)

  state = sums, zeros + _LOWEST, zeros
  summed, maximum, total = block.visits(visit, state)
  is_empty = total == 0.0
  context = summed / across(jnp.where(is_empty, 1.0, total), shape)
  maximum = jnp.where(is_empty, _LOWEST, maximum / LOG2_E)
  if spoilt is not None:
    is_spoilt = cast(spoilt[...], BY_ROW) > 0.0
    context = jnp.where(across(is_spoilt, shape), jnp.nan, context)
    maximum = jnp.where(jnp.isnan(total), jnp.nan, maximum)
  results["context"][...] = context.astype(results["context"].dtype)
  results["maximum"][...] = maximum
  results["total"][...] = total


def _add_keys(block: Block, scores, summed, maximum, total) -> tuple[Any, ...]:
  """Adds a tile of keys to the sums of the queries."""
  (factor,) = block.factors
  after = jnp.maximum(maximum, jnp.max(scores, axis=1) * LOG2_E)
  shrink = jnp.exp2(maximum - after)
  exponentials = jnp.exp2(scores * LOG2_E - across(after, TILE))
  total = total * shrink + jnp.sum(exponentials, axis=1)
  factor[...] = exponentials.astype(factor.dtype)
  plgpu.commit_smem()

  def product(sums):
    plgpu.wgmma(sums, factor, block.tiles["value"])
    return sums[...]

  product = pl.run_scoped(product, plgpu.ACC(summed.shape, jnp.float32))
  return summed * across(shrink, summed.shape) + product, after, total


def _note_flags(block: Block, starts: Sequence[Any], spoilt: Any) -> None:
  """Marks the queries that attend to a key with a flag."""
  tile = jax.lax.div(starts[1], jnp.int32(SIDE))

  @pl.when(block.number("tile flags", tile) > 0.0)
  def _():
    seen = of_visible(block, starts, block.numbers("flags"))
    before = block.problem.cast(spoilt[...], BY_ROW)
    spoilt[...] = jnp.maximum(before, jnp.max(seen, axis=1))
