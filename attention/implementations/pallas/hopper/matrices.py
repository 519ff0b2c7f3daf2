"""Products of tiles with matrices of the device's memory, in Hopper kernels.

The tensor cores multiply numbers of 16 bits. A matrix of float32 is the sum of
two of the tokens' dtype, whose products are added.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.tiles import SIDE, TILE, WGMMA


def is_one_term(matrix: Any) -> bool:
  """Whether a matrix has the tokens' dtype."""
  return matrix.dtype.itemsize == 2


def load(problem: Any, matrix: Any, tile: Any) -> None:
  """Copies a matrix of one term to shared memory, for several products."""
  _load(problem, matrix, tile, is_remainder=False)
  plgpu.commit_smem()


def product(
  problem: Any,
  factor: Any,
  matrix: Any,
  tile: Any,
  *,
  is_transposed: bool = False,
  is_loaded: bool = False,
) -> jax.Array:
  """The product of a tile [64, n] with a matrix, which `tile` has room for."""
  terms = (False,) if is_one_term(matrix) else (False, True)
  # The interpreter transposes no references, and CPUs lack products of 16 bits.
  if problem.interpret:
    total: Any = 0.0
    for is_remainder in terms:
      if not is_loaded:
        _load(problem, matrix, tile, is_remainder)
      right = tile[...].astype(jnp.float32)
      right = right.T if is_transposed else right
      total += factor[...].astype(jnp.float32) @ right
    return total
  right = plgpu.transpose_ref(tile, (1, 0)) if is_transposed else tile

  def compute(sums):
    for is_remainder in terms:
      if is_remainder:
        plgpu.commit_smem()  # all warps have read the first term
      if not is_loaded:
        _load(problem, matrix, tile, is_remainder)
        plgpu.commit_smem()
      plgpu.wgmma(sums, factor, right)
      plgpu.wgmma_wait(0)
    return sums[...]

  size = tile.shape[0 if is_transposed else 1]
  return pl.run_scoped(compute, plgpu.ACC((SIDE, size), jnp.float32))


def add_outer_products(
  problem: Any, result: Any, left: Any, right: Any, is_first: Any
) -> None:
  """Adds the sum over tokens of the outer products of two tiles."""
  for rows, columns in _squares(result.shape):
    factors = left.at[:, rows], right.at[:, columns]
    numbers = _outer_products(problem, *factors)
    add(problem, result.at[rows, columns], numbers, is_first, WGMMA)


def add(
  problem: Any, result: Any, numbers: jax.Array, is_first: Any, layout: Any
) -> None:
  """Adds to an array of the device's memory, or sets it the first time."""
  if is_first is not True:
    before = read(problem.interpret, result, layout)
    numbers = numbers + jnp.where(is_first, 0.0, before)
  result[...] = numbers


def _outer_products(problem: Any, left: Any, right: Any) -> jax.Array:
  if problem.interpret:  # the interpreter transposes no references
    return left[...].astype(jnp.float32).T @ right[...].astype(jnp.float32)

  def compute(sums):
    plgpu.wgmma(sums, plgpu.transpose_ref(left, (1, 0)), right)
    return sums[...]

  return pl.run_scoped(compute, plgpu.ACC(TILE, jnp.float32))


def _load(problem: Any, matrix: Any, tile: Any, is_remainder: bool) -> None:
  """Copies a matrix, or what its rounding leaves, to shared memory."""
  for rows, columns in _squares(tile.shape):
    part = read(problem.interpret, matrix.at[rows, columns])
    rounded = part.astype(tile.dtype)
    if is_remainder:
      rounded = (part - rounded.astype(jnp.float32)).astype(tile.dtype)
    tile[rows, columns] = rounded


def _squares(shape: Sequence[int]) -> Iterator[tuple[Any, Any]]:
  """The places of the squares [64, 64] of a matrix."""
  starts = itertools.product(*(range(0, size, SIDE) for size in shape))
  return ((pl.ds(row, SIDE), pl.ds(column, SIDE)) for row, column in starts)


def read(interpret: Any, ref: Any, layout: Any = WGMMA) -> jax.Array:
  """An array of the device's memory, in registers."""
  if interpret:
    return ref[...].astype(jnp.float32)
  # `optimized` would refuse memory that is not shared.
  return plgpu.load(ref, (), layout=layout, optimized=False).astype(jnp.float32)
