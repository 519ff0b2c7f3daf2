"""Maps of a block's own tokens, and their transposes, in Hopper kernels."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block import Block
from attention.implementations.pallas.hopper.row_functions import (
  Matrix,
  RowFunction,
)
from attention.implementations.pallas.hopper.tiles import (
  SIDE,
  TILE,
  WGMMA,
  Axes,
)


def map_own(block: Block) -> None:
  """Maps own tokens, unless XLA has."""
  if block.own_map is None:
    return
  tile = block.tokens(True)
  tokens = _read(block, block.tiles["unmapped"])
  (mapped,) = _call(block, block.own_map.function, tokens)
  tile[...] = mapped.astype(tile.dtype)
  plgpu.commit_smem()
  if "mapped" in block.direct:
    ref = block.direct["mapped"]
    place = block.place(ref, Axes.MAPPED, block.row * SIDE)
    plgpu.copy_smem_to_gmem(tile, place)
    plgpu.wait_smem_to_gmem(0)


def pull_back(block: Block) -> None:
  """Writes the gradients of tokens before their map, and of its numbers."""
  own_map = block.own_map
  if own_map is None:
    return
  tokens = _read(block, block.tiles["unmapped"])
  of_mapped = _read(block, block.of_mapped)
  of_tokens, *parts = _call(block, own_map.pull_back, tokens, of_mapped)
  result = block.results["tokens"]
  result[...] = of_tokens.astype(result.dtype)
  for name, part in zip(own_map.numbers, parts):
    if name in block.results:
      block.results[name][...] = part


def add_matrices(block: Block, is_first: Any) -> None:
  """Adds the gradients of the map's matrices."""
  matrices = () if block.own_map is None else block.own_map.matrices
  if not any(name in block.direct for name in matrices):
    return
  left, right = block.tiles["unmapped"], block.of_mapped
  tokens, of_mapped = _read(block, left), _read(block, right)
  gradients = _call(block, block.own_map.of_matrices, tokens, of_mapped)
  for name, each in zip(matrices, gradients):
    if name in block.direct:
      left[...] = each.left.astype(left.dtype)
      right[...] = each.right.astype(right.dtype)
      plgpu.commit_smem()
      _add_outer_products(block, block.direct[name], left, right, is_first)


def _add_outer_products(
  block: Block, result: Any, left: Any, right: Any, is_first: Any
) -> None:
  """Adds the sum over tokens of the outer products of two tiles."""
  place = (*block.leading(result.shape[:-3]), jax.lax.axis_index("row"))
  for rows, columns in _squares(result.shape[-2:]):
    factors = left.at[:, rows], right.at[:, columns]
    part = result.at[(*place, rows, columns)]
    before = jnp.where(is_first, 0.0, _read_square(block, part))
    part[...] = before + _outer_products(block, *factors)


def _outer_products(block: Block, left: Any, right: Any) -> jax.Array:
  if block.problem.interpret:  # the interpreter transposes no references
    return jnp.matmul(
      left[...].T, right[...], preferred_element_type=jnp.float32
    )

  def compute(sums):
    plgpu.wgmma(sums, plgpu.transpose_ref(left, (1, 0)), right)
    return sums[...]

  return pl.run_scoped(compute, plgpu.ACC(TILE, jnp.float32))


def _call(block: Block, function: RowFunction, *tiles: jax.Array) -> list[Any]:
  """The results of a function of the map, for tiles in registers."""
  own_map = block.own_map
  numbers = [block.number(name, 0) for name in own_map.numbers]
  matrices = map(Matrix, own_map.matrices)
  product = functools.partial(_product, block)
  return function(*tiles, *numbers, *matrices, product=product)


def _product(block: Block, tokens: jax.Array, matrix: Matrix) -> jax.Array:
  """The product of tokens [64, D] with a matrix [D, A], an input."""
  name, factor = matrix.array, block.map_factor
  factor[...] = tokens.astype(factor.dtype)
  # A matrix of float32 is the sum of two that tensor cores multiply.
  is_wide = block.inputs[name].array.dtype.itemsize > 2
  terms = (False, True) if is_wide else (False,)
  compute = _interpreted if block.problem.interpret else _multiplied
  return compute(block, factor, matrix, terms)


def _multiplied(block, factor, matrix: Matrix, terms: Sequence[bool]):
  right = block.tiles[matrix.array]
  size = right.shape[0 if matrix.is_transposed else 1]
  oriented = (
    plgpu.transpose_ref(right, (1, 0)) if matrix.is_transposed else right
  )

  def compute(sums):
    for is_remainder in terms:
      _load_matrix(block, matrix.array, is_remainder)
      plgpu.commit_smem()
      plgpu.wgmma(sums, factor, oriented)
      plgpu.wgmma_wait(0)
    return sums[...]

  return pl.run_scoped(compute, plgpu.ACC((SIDE, size), jnp.float32))


def _interpreted(block, factor, matrix: Matrix, terms: Sequence[bool]):
  # The interpreter transposes no references.
  total: Any = 0.0
  for is_remainder in terms:
    _load_matrix(block, matrix.array, is_remainder)
    right = block.tiles[matrix.array][...]
    right = right.T if matrix.is_transposed else right
    total += jnp.matmul(factor[...], right, preferred_element_type=jnp.float32)
  return total


def _load_matrix(block: Block, name: str, is_remainder: bool) -> None:
  """Copies a matrix, or what its rounding leaves, to shared memory."""
  ref, tile = block.inputs[name].array, block.tiles[name]
  place = block.leading(ref.shape[:-2])
  for rows, columns in _squares(tile.shape):
    part = _read_square(block, ref.at[(*place, rows, columns)])
    rounded = part.astype(tile.dtype)
    if is_remainder:
      rounded = (part - rounded.astype(jnp.float32)).astype(tile.dtype)
    tile[rows, columns] = rounded


def _squares(shape: Sequence[int]) -> Iterator[tuple[Any, Any]]:
  """The places of the squares [64, 64] of a matrix."""
  starts = itertools.product(*(range(0, size, SIDE) for size in shape))
  return ((pl.ds(row, SIDE), pl.ds(column, SIDE)) for row, column in starts)


def _read_square(block: Block, ref: Any) -> jax.Array:
  """An array [64, 64] of the device's memory, in registers."""
  if block.problem.interpret:
    return ref[...].astype(jnp.float32)
  # `optimized` would refuse memory that is not shared.
  return plgpu.load(ref, (), layout=WGMMA, optimized=False).astype(jnp.float32)


def _read(block: Block, tile: Any) -> jax.Array:
  return block.problem.cast(tile[...].astype(jnp.float32), WGMMA)
