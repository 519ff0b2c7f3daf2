"""Scores of a tile in the kernels for Hopper GPUs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper import (
  distances,
  kept_tiles,
  look_up,
  rotations,
)
from attention.implementations.pallas.hopper.block import Block
from attention.implementations.pallas.hopper.pairs import PairFunction
from attention.implementations.pallas.hopper.tiles import (
  BY_ROW,
  TILE,
  across,
)

# (cotangents of scores, the name of an operand or None) -> the cotangents of
# the products or sums of the pairs, or of the operand.
PullBack = Callable[[Sequence[jax.Array], str | None], jax.Array]


def tile_scores(
  block: Block, starts: Sequence[Any], *, with_nan: bool = False
) -> tuple[list[jax.Array], PullBack]:
  """Scores of a tile, in the layout of the tensor cores' results.

  They are -inf for pairs that the mask hides, and after the last key. With
  `with_nan` other pairs have NaN if a token has NaN or infinity. For `Quotient`
  there are two: the scores of numerators and those of denominators.
  """
  problem = block.problem
  if problem.channels is not None:
    problem.channels.prepare(block, of_own=False)
    result = problem.channels.sums(block)
  else:
    rotations.prepare_visited(block)
    own, other = block.own_and_other
    factors = [(own, other), *rotations.factors(block)]
    if "remainder" in block.tiles:
      factors.append((block.tiles["remainder"], other))
    of_others = distances.of_others(block, starts)
    result = products_of_tokens(problem, factors)
    result = distances.with_own(block, [result, *of_others], starts)
    result = result if problem.factor == 1.0 else result * problem.factor
    result = times_visited_scales(block, times_own_scales(block, result))
  if with_nan:
    # If a token has NaN or infinity, so has its product, or its first channel
    # (such mapped tokens are NaN throughout). Times 0 these are NaN.
    if problem.channels is None:
      of_nan = 0.0 * result
    else:
      of_nan = 0.0 * problem.channels.sums_of_pairs(block, 0)
  places = _positions(block, starts)
  pull_back: PullBack = _unchanged
  results = [result]
  if problem.changed is not None:
    if block.products is not None:
      kept_tiles.write(problem, block.products, result)
    arguments = _arguments(block, problem.changed, places)
    results = problem.changed(result, *arguments)

    def pull_back(cotangents, name):
      # Registers are scarce, so products are kept in shared memory.
      products = kept_tiles.read(problem, block.products)
      arguments = products, *_arguments(block, problem.changed, places)
      return problem.changed.gradient(arguments, cotangents, name)

  if with_nan:
    results = [each + of_nan for each in results]
  if problem.bias is not None:
    (bias,) = problem.bias(*_arguments(block, problem.bias, places))
    results = [each + bias for each in results]
    if with_nan:
      results = [jnp.where(bias == -jnp.inf, bias, each) for each in results]
  if problem.visible is not None:
    (visible,) = problem.visible(*_arguments(block, problem.visible, places))
    results = [jnp.where(visible, each, -jnp.inf) for each in results]
  return results, pull_back


def times_own_scales(block: Block, numbers: jax.Array) -> jax.Array:
  """Numbers of the pairs of a tile, times the scales of own tokens."""
  if block.own_scale is not None:
    own = block.problem.cast(block.own_scale[...], BY_ROW)
    return numbers * across(own, TILE)
  is_scaled = block.are_keys_own and "key scale" in block.inputs
  return numbers * block.numbers("key scale") if is_scaled else numbers


def times_visited_scales(block: Block, numbers: jax.Array) -> jax.Array:
  """Numbers of the pairs of a tile, times the scales of visited tokens."""
  name = "query scale" if block.are_keys_own else "key scale"
  return numbers * block.numbers(name) if name in block.inputs else numbers


def of_visible(
  block: Block, starts: Sequence[Any], numbers: jax.Array
) -> jax.Array:
  """Numbers of the pairs of a tile, 0 where the mask or the bias hides them."""
  problem, places = block.problem, _positions(block, starts)
  if problem.bias is not None:
    (bias,) = problem.bias(*_arguments(block, problem.bias, places))
    numbers = jnp.where(bias == -jnp.inf, 0.0, numbers)
  if problem.visible is not None:
    (visible,) = problem.visible(*_arguments(block, problem.visible, places))
    numbers = jnp.where(visible, numbers, 0.0)
  return numbers


def _unchanged(cotangents: Sequence[jax.Array], name: str | None) -> jax.Array:
  del name
  (result,) = cotangents
  return result


def products_of_tokens(
  problem: Any, factors: Sequence[tuple[Any, Any]]
) -> jax.Array:
  """The sum of the dot products of some tiles [64, D] with others."""
  if problem.interpret:  # the interpreter transposes no references
    products = [
      jnp.matmul(own[...], other[...].T, preferred_element_type=jnp.float32)
      for own, other in factors
    ]
    return functools.reduce(jnp.add, products)

  def product(sums):
    for own, other in factors:
      plgpu.wgmma(sums, own, plgpu.transpose_ref(other, (1, 0)))
    return sums[...]

  return pl.run_scoped(product, plgpu.ACC(TILE, jnp.float32))


def _positions(block: Block, starts: Sequence[Any]) -> list[jax.Array]:
  """The positions of the queries and keys of all pairs of a tile."""
  places = [
    look_up.positions(block.problem, axis, start)
    for axis, start in enumerate(starts)
  ]
  return places[::-1] if block.are_keys_own else places


def _arguments(block: Block, function: PairFunction, places) -> list[Any]:
  """The positions, the indices and the parts that a function reads."""
  parts = [block.numbers(name) for name in function.names]
  return [*places, *block.leading(block.problem.leading), *parts]
