"""Maps of a block's own tokens, and their transposes, in Hopper kernels."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.terms import scales
from attention.implementations.pallas.hopper.tiles import matrices, parts
from attention.implementations.pallas.hopper.tiles.layout import BY_ROW, WGMMA
from attention.implementations.pallas.hopper.traced.row_functions import (
  Matrix,
  RowFunction,
)


def map_own(block: Block) -> None:
  """Maps own tokens, or computes their scales."""
  if block.own_map is None:
    return
  if block.own_map.is_scaling:
    if not block.are_keys_own:
      _write_scales(block)
    return
  tile = block.tokens(True)
  tokens = _read(block, block.tiles["unmapped"])
  (mapped,) = _call(block, block.own_map.function, tokens)
  rounded = mapped.astype(tile.dtype)
  tile[...] = rounded
  remainder = mapped - rounded.astype(jnp.float32)
  block.tiles["remainder"][...] = remainder.astype(tile.dtype)
  plgpu.commit_smem()


def _write_scales(block: Block) -> None:
  """Computes the scales of own queries."""
  tokens = _read(block, block.tokens(True))
  own = scales.of_tile(block.own_map, tokens, *_numbers(block))
  own = block.problem.cast(own, BY_ROW)
  block.own_numbers["query scale"][...] = own
  if "query scale" in block.results:
    block.results["query scale"][...] = own
  plgpu.commit_smem()


def pull_back(block: Block, others: jax.Array | None) -> None:
  """Writes the gradients of tokens before their map, and of its numbers.

  Others are those of the same tokens, to which it adds.
  """
  own_map = block.own_map
  tokens = _read(block, block.unmapped)
  of_mapped = _read(block, block.of_term["mapped"])
  of_tokens, *of_numbers = _call(block, own_map.pull_back, tokens, of_mapped)
  of_tokens = of_tokens if others is None else of_tokens + others
  result = block.results["tokens"]
  result[...] = of_tokens.astype(result.dtype)
  for name, part in zip(own_map.numbers, of_numbers):
    if name in block.results:
      block.results[name][...] = part


def add_matrices(block: Block) -> None:
  """Adds the gradients of the map's matrices to the block's parts."""
  own = block.own_map.matrices
  if not any(name in block.direct for name in own):
    return
  left, right = block.tiles["unmapped"], block.of_term["mapped"]
  tokens, of_mapped = _read(block, left), _read(block, right)
  gradients = _call(block, block.own_map.of_matrices, tokens, of_mapped)
  for name, each in zip(own, gradients):
    if name in block.direct:
      left[...] = each.left.astype(left.dtype)
      right[...] = each.right.astype(right.dtype)
      plgpu.commit_smem()
      parts.add_outer_products(block, name, left, right)


def _call(block: Block, function: RowFunction, *tiles: jax.Array) -> list[Any]:
  """The results of a function of the map, for tiles in registers."""
  own_map = block.own_map
  own = map(Matrix, own_map.matrices)
  product = functools.partial(_product, block)
  return function(*tiles, *_numbers(block), *own, product=product)


def _numbers(block: Block) -> list[Any]:
  return [block.number(name, 0) for name in block.own_map.numbers]


def _product(block: Block, tokens: jax.Array, matrix: Matrix) -> jax.Array:
  """The product of tokens [64, D] with a matrix [D, A], an input."""
  name, factor = matrix.array, block.tokens(True)
  factor[...] = tokens.astype(factor.dtype)
  return matrices.product(
    block.problem,
    factor,
    block.matrix(name, slice(None)),
    block.tiles[name],
    is_transposed=matrix.is_transposed,
  )


def _read(block: Block, tile: Any) -> jax.Array:
  return block.problem.cast(tile[...].astype(jnp.float32), WGMMA)
