"""One block of the forward kernel for Hopper GPUs: 64 queries."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas import hopper_tiles as tiles
from attention.implementations.pallas.hopper_tiles import Block, Part

_LOWEST = float(np.finfo(np.float32).min)


class _Memory(NamedTuple):
  """Tiles in shared memory, and barriers."""

  query: Any
  key: Any
  value: Any
  weight: Sequence[Any]  # of the channels of an additive score, one array
  context: Any
  maximum: Any
  total: Any
  flags: Any  # of the keys, if some may be hidden
  spoilt: Any  # the largest flag of the keys that a query attends to
  exponentials: Any
  query_barrier: Any
  key_barrier: Any


def run_block(problem: Any, bounds: Any, query, key, value, *refs) -> None:
  """Allocates memory and computes the online softmax of 64 queries."""
  # With a mask, `bounds` ends with the largest flag.
  flags, refs = refs[: problem.is_masked], refs[problem.is_masked :]
  weight, refs = refs[: problem.is_additive], refs[problem.is_additive :]
  context, maximum, total, *spoilt = refs
  of_tokens = tiles.CHANNELS if problem.is_additive else tiles.TOKENS
  memory = _Memory(
    tiles.shared_tile(query, of_tokens),
    tiles.shared_tile(key, of_tokens),
    tiles.shared_tile(value, tiles.TOKENS),
    [tiles.shared_tile(each, tiles.WHOLE) for each in weight],
    tiles.shared_tile(context, tiles.TOKENS),
    tiles.shared_tile(maximum, tiles.ROWS),
    tiles.shared_tile(total, tiles.ROWS),
    [tiles.shared_tile(each, tiles.ROWS) for each in flags],
    [tiles.shared_tile(each, tiles.ROWS) for each in spoilt],
    tiles.factor_tile(value.dtype),
    plgpu.Barrier(num_arrivals=1 + len(weight)),
    plgpu.Barrier(num_arrivals=2 + len(flags)),
  )

  def compute(memory):
    own = [Part(query, memory.query, of_tokens)]
    own += [Part(*each, tiles.WHOLE) for each in zip(weight, memory.weight)]
    others = [
      Part(key, memory.key, of_tokens),
      Part(value, memory.value, tiles.TOKENS),
    ]
    others += [Part(*each, tiles.ROWS) for each in zip(flags, memory.flags)]
    results = [
      Part(context, memory.context, tiles.TOKENS),
      Part(maximum, memory.maximum, tiles.ROWS),
      Part(total, memory.total, tiles.ROWS),
    ]
    results += [Part(*each, tiles.ROWS) for each in zip(spoilt, memory.spoilt)]
    block = tiles.current_block(problem)
    block.load(own, block.row * tiles.SIDE, memory.query_barrier)
    _online_softmax(block, bounds, others, memory)
    block.store(results)

  pl.run_scoped(compute, memory)


def _online_softmax(block: Block, bounds, others, memory: _Memory) -> None:
  """Computes the context and the statistics of the queries."""
  cast, shape = block.problem.cast, memory.context.shape
  zeros = jnp.zeros((tiles.SIDE,), jnp.float32)
  state = (
    cast(jnp.zeros(shape, jnp.float32), tiles.WGMMA),
    cast(zeros + _LOWEST, tiles.BY_ROW),
    cast(zeros, tiles.BY_ROW),
  )
  for each in memory.spoilt:
    each[...] = cast(zeros, tiles.BY_ROW)
  summed, maximum, total = jax.lax.fori_loop(
    bounds[2 * block.row],
    bounds[2 * block.row + 1],
    functools.partial(_visit, block, bounds, others, memory),
    state,
  )
  is_empty = total == 0.0
  context = summed / tiles.across(jnp.where(is_empty, 1.0, total), shape)
  memory.context[...] = context.astype(memory.context.dtype)
  memory.maximum[...] = jnp.where(is_empty, _LOWEST, maximum / tiles.LOG2_E)
  memory.total[...] = total


def _visit(block: Block, bounds, others, memory: _Memory, column, state):
  """Adds a tile of keys to the sums of the queries."""
  summed, maximum, total = state
  start = column * tiles.SIDE
  block.load(others, start, memory.key_barrier)
  weight = memory.weight[0] if memory.weight else None
  scores = tiles.scores(block.problem, memory.query, memory.key, weight)
  starts = block.row * tiles.SIDE, start
  scores = tiles.masked(block.problem, scores, starts, are_keys_own=False)
  if block.problem.is_masked:
    _note_flags(block.problem, bounds, memory, scores)
  after = jnp.maximum(maximum, jnp.max(scores, axis=1) * tiles.LOG2_E)
  shrink = jnp.exp2(maximum - after)
  exponentials = jnp.exp2(
    scores * tiles.LOG2_E - tiles.across(after, tiles.TILE)
  )
  total = total * shrink + jnp.sum(exponentials, axis=1)
  memory.exponentials[...] = exponentials.astype(memory.exponentials.dtype)
  plgpu.commit_smem()

  def product(sums):
    plgpu.wgmma(sums, memory.exponentials, memory.value)
    return sums[...]

  product = pl.run_scoped(product, plgpu.ACC(summed.shape, jnp.float32))
  return summed * tiles.across(shrink, summed.shape) + product, after, total


def _note_flags(problem, bounds, memory: _Memory, scores) -> None:
  """Notes the flags of the keys that queries attend to, if a key has one."""
  (flags,), (spoilt,) = memory.flags, memory.spoilt

  @pl.when(bounds[bounds.shape[0] - 1] > 0)
  def _():
    of_keys = tiles.down(problem.cast(flags[...], tiles.BY_COLUMN), tiles.TILE)
    seen = jnp.max(jnp.where(scores == -jnp.inf, 0.0, of_keys), axis=1)
    before = problem.cast(spoilt[...], tiles.BY_ROW)
    spoilt[...] = jnp.maximum(before, seen)
