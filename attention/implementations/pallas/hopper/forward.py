"""A block of the forward kernel for Hopper GPUs: 64 queries."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.scores import LOG2_E, tile_scores
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
  cast, results = block.problem.cast, block.results
  shape = results["context"].shape
  zeros = jnp.zeros((SIDE,), jnp.float32)
  state = (
    cast(jnp.zeros(shape, jnp.float32), WGMMA),
    cast(zeros + _LOWEST, BY_ROW),
    cast(zeros, BY_ROW),
  )
  if block.problem.is_masked:
    results["spoilt"][...] = cast(zeros, BY_ROW)

  def visit(starts, state):
    scores, _ = tile_scores(block, starts)
    if block.problem.is_masked:
      _note_flags(block, scores)
    return _add_keys(block, scores, *state)

  summed, maximum, total = block.visits(visit, state)
  is_empty = total == 0.0
  context = summed / across(jnp.where(is_empty, 1.0, total), shape)
  results["context"][...] = context.astype(results["context"].dtype)
  results["maximum"][...] = jnp.where(is_empty, _LOWEST, maximum / LOG2_E)
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


def _note_flags(block: Block, scores: jax.Array) -> None:
  """Notes the flags of the keys that queries attend to, if a key has one."""
  largest = block.bounds[block.bounds.shape[0] - 1]
  spoilt = block.results["spoilt"]

  @pl.when(largest > 0)
  def _():
    seen = jnp.where(scores == -jnp.inf, 0.0, block.numbers("flags"))
    before = block.problem.cast(spoilt[...], BY_ROW)
    spoilt[...] = jnp.maximum(before, jnp.max(seen, axis=1))
