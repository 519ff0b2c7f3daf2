"""One block of the gradient kernels for Hopper GPUs: 64 queries, or 64 keys.

Both kernels compute scores and weights again, from the statistics of the rows.
The kernel of queries computes the gradients of queries and of an additive
score's weight, the kernel of keys those of keys and values.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas import hopper_tiles as tiles
from attention.implementations.pallas.hopper_tiles import Block, Part


class Arrays(NamedTuple):
  """The arrays that a kernel reads, their axes, or tiles of them."""

  query: Any
  cotangent: Any  # of the context
  maximum: Any
  inverse: Any  # of the total
  mean: Any  # of the cotangents of a row's weights
  key: Any
  value: Any
  weight: Any = None  # of the channels of an additive score

  def tokens(self, are_keys: bool) -> tuple[Any, ...]:
    """What belongs to keys, or to queries."""
    return self[5:7] if are_keys else self[:5]


class _Memory(NamedTuple):
  """What a block allocates."""

  tiles: Arrays
  of_scores: Any
  weights: Any
  results: Sequence[Any]  # the gradient of own tokens, and another one
  own_barrier: Any
  other_barrier: Any


def run_block(problem: Any, bounds: Any, *refs, are_keys_own: bool) -> None:
  """Allocates memory and computes the gradients of 64 own tokens."""
  number = 7 + problem.is_additive
  arrays, results = Arrays(*refs[:number]), refs[number:]
  axes, of_results = _axes(problem, are_keys_own)
  own = arrays.tokens(are_keys_own) + arrays[7:number]
  other = arrays.tokens(not are_keys_own)

  def compute(memory):
    def parts(are_keys):
      return map(
        Part,
        arrays.tokens(are_keys),
        memory.tiles.tokens(are_keys),
        axes.tokens(are_keys),
      )

    block = tiles.current_block(problem)
    own_parts = [*parts(are_keys_own)]
    own_parts += map(Part, arrays[7:number], memory.tiles[7:], axes[7:])
    block.load(own_parts, block.row * tiles.SIDE, memory.own_barrier)
    other_parts = [*parts(not are_keys_own)]
    _gradients(block, bounds, other_parts, memory, are_keys_own)
    block.store([*map(Part, results, memory.results, of_results)])

  memory = _Memory(
    Arrays(*map(tiles.shared_tile, refs[:number], axes)),
    tiles.factor_tile(arrays.value.dtype),
    tiles.factor_tile(arrays.value.dtype),
    [*map(tiles.shared_tile, results, of_results)],
    plgpu.Barrier(num_arrivals=len(own)),
    plgpu.Barrier(num_arrivals=len(other)),
  )
  pl.run_scoped(compute, memory)


def _axes(problem: Any, are_keys_own: bool) -> tuple[Arrays, tuple[Any, ...]]:
  """The axes of the arrays and of the results."""
  of_tokens = tiles.CHANNELS if problem.is_additive else tiles.TOKENS
  axes = Arrays(
    query=of_tokens,
    cotangent=tiles.TOKENS,
    maximum=tiles.ROWS,
    inverse=tiles.ROWS,
    mean=tiles.ROWS,
    key=of_tokens,
    value=tiles.TOKENS,
    weight=tiles.WHOLE,
  )
  return axes, (of_tokens, tiles.TOKENS if are_keys_own else tiles.CHANNELS)


def _gradients(block: Block, bounds, others, memory, are_keys_own) -> None:
  """Adds the gradients of all visited tiles, and stores them in tiles."""
  problem = block.problem
  if problem.is_additive:
    _set_channels_to_zero(problem, memory.results[: 2 - are_keys_own])

  def visits(*sums):
    jax.lax.fori_loop(
      bounds[2 * block.row],
      bounds[2 * block.row + 1],
      functools.partial(_visit, block, others, memory, are_keys_own, sums),
      None,
    )
    for result, total, factor in zip(products, sums, factors):
      total = total[...]
      total = total if factor == 1.0 else total * factor
      result[...] = total.astype(result.dtype)

  # Tensor cores sum the gradients of dot products and of values.
  products = memory.results[problem.is_additive :]
  factors = [problem.factor, 1.0][problem.is_additive :]
  if problem.is_additive and not are_keys_own:
    products = []
  pl.run_scoped(
    visits, *(plgpu.ACC(each.shape, jnp.float32) for each in products)
  )


def _visit(block, others, memory, are_keys_own, sums, column, _) -> None:
  """Adds the gradients of a tile of other tokens."""
  problem, start = block.problem, column * tiles.SIDE
  block.load(others, start, memory.other_barrier)
  own, own_values, other, other_values, spread = _roles(memory, are_keys_own)
  scores = tiles.scores(problem, own, other, memory.tiles.weight)
  starts = block.row * tiles.SIDE, start
  scores = tiles.masked(problem, scores, starts, are_keys_own)
  # Each array is read where it is used, as registers are scarce.
  rows = memory.tiles
  # Scores that are computed twice may be rounded differently.
  exponents = jnp.minimum(scores - spread(problem, rows.maximum), 0.0)
  weights = jnp.exp2(exponents * tiles.LOG2_E) * spread(problem, rows.inverse)
  if are_keys_own:
    memory.weights[...] = weights.astype(memory.weights.dtype)
  of_weights = tiles.product_of_tokens(problem, own_values, other_values)
  of_scores = weights * (of_weights - spread(problem, rows.mean))
  if problem.is_additive:
    _add_channels(problem, memory, own, other, of_scores, are_keys_own)
  else:
    memory.of_scores[...] = of_scores.astype(memory.of_scores.dtype)
  plgpu.commit_smem()
  if not problem.is_additive:
    plgpu.wgmma(sums[0], memory.of_scores, other)
  if are_keys_own:
    plgpu.wgmma(sums[-1], memory.weights, other_values)
  if sums:  # the next visit overwrites the factors
    plgpu.wgmma_wait(0)


def _roles(memory: _Memory, are_keys_own: bool) -> tuple[Any, ...]:
  """Own tokens and values, other tokens and values, and how rows spread."""
  # The values of queries are the cotangents of their contexts.
  rows = memory.tiles.query, memory.tiles.cotangent
  columns = memory.tiles.key, memory.tiles.value
  if are_keys_own:
    return *columns, *rows, _down
  return *rows, *columns, _across


def _across(problem: Any, tile: Any) -> jax.Array:
  return tiles.across(problem.cast(tile[...], tiles.BY_ROW), tiles.TILE)


def _down(problem: Any, tile: Any) -> jax.Array:
  return tiles.down(problem.cast(tile[...], tiles.BY_COLUMN), tiles.TILE)


def _add_channels(problem, memory, own, other, of_scores, are_keys_own) -> None:
  """Adds the gradients of an additive score, channel by channel."""
  weight, (of_own, *of_weight) = memory.tiles.weight, memory.results
  of_weight = [] if are_keys_own else of_weight

  def add(channel, state):
    tanh = tiles.channel_tanh(problem, own, other, channel)
    of_sum = jnp.sum((1.0 - tanh * tanh) * of_scores, axis=1)
    of_own[channel] = (
      problem.cast(of_own[channel], tiles.BY_ROW) + of_sum * weight[channel]
    )
    for each in of_weight:
      each[channel] = problem.cast(each[channel], tiles.BY_ROW) + jnp.sum(
        of_scores * tanh, axis=1
      )
    return state

  tiles.for_each_channel(own.shape[0], add, None)


def _set_channels_to_zero(problem: Any, results: Sequence[Any]) -> None:
  zeros = problem.cast(jnp.zeros((tiles.SIDE,), jnp.float32), tiles.BY_ROW)

  def clear(channel, state):
    for each in results:
      each[channel] = zeros
    return state

  tiles.for_each_channel(results[0].shape[0], clear, None)
