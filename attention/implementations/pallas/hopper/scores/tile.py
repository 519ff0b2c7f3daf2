"""Scores of a tile in the kernels for Hopper GPUs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.scores import distances, rotations
from attention.implementations.pallas.hopper.tiles import kept_tiles, look_up
from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import TILE
from attention.implementations.pallas.hopper.traced.pairs import PairFunction


@dataclasses.dataclass(frozen=True)
class TileScores:
  """The scores of a tile, in the layout of the tensor cores' results.

  They are -inf for pairs that the mask hides, and after the last key. For
  `Quotient` there are two: those of numerators and those of denominators.
  """

  block: Block
  starts: Sequence[Any]  # of the queries and keys
  scores: list[jax.Array]

  def with_dropout(self, numbers: jax.Array) -> jax.Array:
    """Weights, or cotangents of weights, times the factors of dropout."""
    if self.block.problem.dropout is None:
      return numbers
    if self.block.dropout_factors is None:
      return numbers * _factors(self.block, self.starts)
    return numbers * kept_tiles.read(
      self.block.problem, self.block.dropout_factors
    )

  def pull_back(
    self, cotangents: Sequence[jax.Array], name: str | None
  ) -> jax.Array:
    """The cotangents of products or sums, or of the operand of a name."""
    problem = self.block.problem
    changed, bias = problem.changed, problem.bias
    if bias is not None and name in bias.names:
      total = functools.reduce(jnp.add, cotangents)
      arguments = _arguments(
        self.block, bias, _positions(self.block, self.starts)
      )
      return bias.gradient(arguments, [total], name)
    if changed is None:
      (result,) = cotangents
      return result
    # Registers are scarce, so products are kept in shared memory.
    products = kept_tiles.read(problem, self.block.products)
    places = _positions(self.block, self.starts)
    others = _arguments(self.block, changed, places)
    return changed.gradient([products, *others], cotangents, name)


def tile_scores(
  block: Block, starts: Sequence[Any], *, with_nan: bool = False
) -> TileScores:
  """The scores of a tile.

  With `with_nan` visible pairs have NaN if a token has NaN or infinity.
  """
  problem, of_nan = block.problem, None
  if block.dropout_factors is not None:
    # Read twice. Registers are scarce, so this is before the products.
    kept_tiles.write(problem, block.dropout_factors, _factors(block, starts))
  products = _products(block, starts)
  if block.products is not None:
    kept_tiles.write(problem, block.products, products)
  if with_nan:
    # If a token has NaN or infinity, so has its product, or its first channel
    # (such mapped tokens are NaN throughout). Times 0 these are NaN.
    first = products
    if problem.channels is not None:
      first = problem.channels.sums_of_pairs(block, 0)
    of_nan = 0.0 * first
  return TileScores(block, starts, _finished(block, starts, products, of_nan))


def _factors(block: Block, starts: Sequence[Any]) -> jax.Array:
  """The factors of dropout."""
  return _value(block, block.problem.dropout, _positions(block, starts))


def _products(block: Block, starts: Sequence[Any]) -> jax.Array:
  """The products or sums of the pairs of a tile, before wrappers."""
  problem = block.problem
  if problem.channels is not None:
    problem.channels.prepare(block, of_own=False)
    return problem.channels.sums(block)
  rotations.prepare_visited(block)
  own, other = block.own_and_other
  factors = [(own, other), *rotations.factors(block)]
  if "remainder" in block.tiles:
    factors.append((block.tiles["remainder"], other))
  of_others = distances.of_others(block, starts)
  result = products_of_tokens(problem, factors)
  result = distances.with_own(block, [result, *of_others], starts)
  result = result if problem.factor == 1.0 else result * problem.factor
  return times_visited_scales(block, times_own_scales(block, result))


def _finished(
  block: Block,
  starts: Sequence[Any],
  products: jax.Array,
  of_nan: jax.Array | None = None,
) -> list[jax.Array]:
  """The scores of products, after wrappers, the bias and the mask.

  `of_nan` is NaN for pairs with NaN, else 0; None if there are none.
  """
  problem, results = block.problem, [products]
  places = _positions(block, starts)
  if problem.changed is not None:
    arguments = _arguments(block, problem.changed, places)
    results = problem.changed(products, *arguments)
  if of_nan is not None:
    results = [each + of_nan for each in results]
  if problem.bias is not None:
    bias = _value(block, problem.bias, places)
    results = [each + bias for each in results]
    if problem.bias_may_hide:
      # The scores of hidden pairs may be NaN or infinite.
      results = [jnp.where(bias == -jnp.inf, bias, each) for each in results]
  if problem.visible is not None:
    visible = _value(block, problem.visible, places)
    results = [jnp.where(visible, each, -jnp.inf) for each in results]
  return results


def times_own_scales(block: Block, numbers: jax.Array) -> jax.Array:
  """Numbers of the pairs of a tile, times the scales of own tokens."""
  if "query scale" in block.own_numbers:
    return numbers * block.numbers("query scale")
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
  if problem.bias_may_hide:
    bias = _value(block, problem.bias, places)
    numbers = jnp.where(bias == -jnp.inf, 0.0, numbers)
  if problem.visible is not None:
    visible = _value(block, problem.visible, places)
    numbers = jnp.where(visible, numbers, 0.0)
  return numbers


def products_of_tokens(
  device: Device, factors: Sequence[tuple[Any, Any]]
) -> jax.Array:
  """The sum of the dot products of some tiles [64, D] with others."""
  pairs = [(own, device.transposed(other)) for own, other in factors]
  return device.products(TILE, pairs)


def _positions(block: Block, starts: Sequence[Any]) -> list[jax.Array]:
  """The positions of the queries and keys of all pairs of a tile.

  The compiler computes them again at each call. It would keep those of one call
  for the others, in registers that products need.
  """
  places = [
    look_up.positions(block.problem, axis, start + block.zero[0])
    for axis, start in enumerate(starts)
  ]
  return places[::-1] if block.are_keys_own else places


def _value(block: Block, function: PairFunction, places) -> jax.Array:
  """The number of each pair."""
  (numbers,) = function(*_arguments(block, function, places))
  return numbers


def _arguments(block: Block, function: PairFunction, places) -> list[Any]:
  """The positions, the indices and the parts that a function reads."""
  indices = [
    np.int32(each) if isinstance(each, int) else each
    for each in block.leading(block.problem.leading)
  ]
  parts = [block.numbers(name) for name in function.names]
  return [*places, *indices, *parts]
