"""Scores of a tile in the kernels for Hopper GPUs."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.interpreters import partial_eval as partial_evaluation

from attention.implementations.pallas import hopper_tiles as tiles
from attention.implementations.pallas.functions import (
  TileFunction,
  check_supported,
)
from attention.implementations.pallas.hopper_tiles import TILE, WGMMA, Block
from attention.implementations.pallas.operands import (
  Blocks,
  Kind,
  Plan,
  Unsupported,
)
from attention.implementations.pallas.pairwise import Tile, values
from attention.positional import Pairwise

LOG2_E = math.log2(math.e)


def scores(block: Block, starts: Sequence[Any]) -> jax.Array:
  """Scores of a tile, in the layout of the tensor cores' results.

  They are -inf for pairs that the mask hides, and after the last key.
  """
  problem = block.problem
  names = ("key", "query") if block.are_keys_own else ("query", "key")
  own, other = (block.tiles[name] for name in names)
  if problem.is_additive:
    result = _additive(problem, own, other, block.tiles["weight"])
  else:
    result = product_of_tokens(problem, own, other)
    result = result if problem.factor == 1.0 else result * problem.factor
  return _with_bias_and_mask(block, result, starts)


def _additive(problem: Any, own: Any, other: Any, weight: Any) -> jax.Array:
  def add(channel, sums):
    return sums + channel_tanh(problem, own, other, channel) * weight[channel]

  zeros = problem.cast(jnp.zeros(TILE, jnp.float32), WGMMA)
  return for_each_channel(own.shape[0], add, zeros)


def for_each_channel(channels: int, body: Callable, state: Any) -> Any:
  """The state after body(channel, state), with four in an iteration."""
  count = 4 if channels % 4 == 0 else 1

  def several(number, state):
    for offset in range(count):
      state = body(number * count + offset, state)
    return state

  return jax.lax.fori_loop(0, channels // count, several, state)


def channel_tanh(problem: Any, own: Any, other: Any, channel: Any) -> jax.Array:
  """tanh(q + k) of the pairs of a tile, for one channel."""
  rows = problem.cast(own[channel], tiles.BY_ROW)
  columns = problem.cast(other[channel], tiles.BY_COLUMN)
  return jnp.tanh(tiles.across(rows, TILE) + tiles.down(columns, TILE))


def product_of_tokens(problem: Any, own: Any, other: Any) -> jax.Array:
  """The dot products of tokens [64, D] with tokens [64, D]."""
  if problem.interpret:  # the interpreter transposes no references
    return jnp.matmul(
      own[...], other[...].T, preferred_element_type=jnp.float32
    )

  def product(sums):
    plgpu.wgmma(sums, own, plgpu.transpose_ref(other, (1, 0)))
    return sums[...]

  return pl.run_scoped(product, plgpu.ACC(TILE, jnp.float32))


def _with_bias_and_mask(block: Block, scores, starts) -> jax.Array:
  problem = block.problem
  if problem.visible is None and problem.bias is None:
    return scores
  places = [
    problem.cast(jax.lax.broadcasted_iota(jnp.int32, TILE, axis), WGMMA) + start
    for axis, start in enumerate(starts)
  ]
  queries, keys = reversed(places) if block.are_keys_own else places
  indices = block.leading(problem.leading)

  def evaluate(function, first):
    names = problem.pair_inputs[first : first + len(function.operands)]
    parts = [*map(block.numbers, names)]
    return function({}, [queries, keys, *indices], parts)

  first = 0
  if problem.bias is not None:
    scores = scores + evaluate(problem.bias, 0)
    first = len(problem.bias.operands)
  if problem.visible is None:
    return scores
  return jnp.where(evaluate(problem.visible, first), scores, -jnp.inf)


def traced_pairs(parts: Sequence[Pairwise], rank: int) -> TileFunction:
  """A bias, or the conjunction of masks, as a function of positions.

  Its arguments are the positions of the queries and keys of all pairs of a
  tile and the indices along the leading axes.
  """
  plan, one = Plan(), jnp.zeros((1, 1), jnp.int32)
  for each in parts:
    values(each, Tile(plan, one, one, rank))
  kinds = {Kind.SCALAR: (), Kind.ROW: TILE, Kind.COLUMN: TILE}
  if any(each.kind not in kinds for each in plan.operands):
    raise Unsupported(
      "supports arrays of masks and biases that have a number for each query, "
      "each key or each entry of the leading axes, not for each pair"
    )

  def compute(queries, keys, *others):
    at = Tile(Blocks(others[rank:], others[:rank]), queries, keys, rank)
    results = [values(each, at) for each in parts]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, results), TILE)

  pairs, number = (jax.ShapeDtypeStruct(n, jnp.int32) for n in (TILE, ()))
  arguments = [pairs, pairs, *[number] * rank]
  arguments += [
    jax.ShapeDtypeStruct(kinds[each.kind], number_dtype(each.array))
    for each in plan.operands
  ]
  closed = jax.make_jaxpr(compute)(*arguments)
  # Without operations on arrays that only the plan needs.
  jaxpr, _ = partial_evaluation.dce_jaxpr(
    closed.jaxpr, [True], instantiate=[True] * len(arguments)
  )
  check_supported(jaxpr, {})
  read = {id(atom) for each in jaxpr.eqns for atom in each.invars}
  if any(id(each) in read for each in jaxpr.constvars):
    raise Unsupported("supports masks and biases that capture no arrays")
  return TileFunction(jaxpr.replace(constvars=[]), plan.operands, 0)


def number_dtype(array: jax.Array) -> Any:
  """That of the numbers which a kernel reads: float32 or int32."""
  is_float = jnp.issubdtype(array.dtype, jnp.floating)
  return jnp.dtype(jnp.float32 if is_float else jnp.int32)
