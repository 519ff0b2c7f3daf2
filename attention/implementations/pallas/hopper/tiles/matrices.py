"""Products of tiles with matrices of the device's memory, in Hopper kernels.

The tensor cores multiply numbers of 16 bits. A matrix of float32 is the sum of
two of the tokens' dtype, whose products are added.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  WGMMA,
  pieces,
)


def has_terms(matrix: Any, tokens: Any) -> bool:
  """Whether a matrix is a sum of one or two of the tokens' dtype."""
  # float16 has a smaller exponent range than float32.
  is_wide = matrix.dtype == jnp.float32 and tokens.dtype == jnp.bfloat16
  return matrix.dtype == tokens.dtype or is_wide


def is_one_term(matrix: Any) -> bool:
  """Whether a matrix has the tokens' dtype."""
  return matrix.dtype.itemsize == 2


def load(problem: Any, matrix: Any, *tiles: Any) -> None:
  """Copies the terms of a matrix to shared memory, for several products."""
  _load(problem, matrix, [*zip(tiles, (False, True))])
  plgpu.commit_smem()


def product(
  problem: Any,
  factor: Any,
  matrix: Any,
  *tiles: Any,
  is_transposed: bool = False,
  is_loaded: bool = False,
  columns: int | None = None,
) -> jax.Array:
  """The product of a tile [64, n] with a matrix, or its first columns.

  A tile has room for the matrix. With a second one for its remainder fewer
  registers are needed.
  """
  size = tiles[0].shape[0 if is_transposed else 1]
  columns = size if columns is None else columns

  def right(tile):
    if not is_transposed:
      return tile
    # The interpreter transposes no references.
    if problem.interpret:
      return tile[...][:columns].T
    return plgpu.transpose_ref(tile.at[pl.ds(0, columns)], (1, 0))

  def compute(sums):
    terms = _terms(problem, matrix, tiles, is_loaded=is_loaded)
    if problem.interpret:  # CPUs lack products of 16 bits
      left = factor[...].astype(jnp.float32)
      products = [left @ right(each)[...].astype(jnp.float32) for each in terms]
      return functools.reduce(jnp.add, products)
    for tile in terms:
      plgpu.wgmma(sums, factor, right(tile))
      plgpu.wgmma_wait(0)
    return sums[...]

  return pl.run_scoped(compute, plgpu.ACC((SIDE, columns), jnp.float32))


def add_product(
  problem: Any, sums: Any, factor: Any, matrix: Any, *tiles: Any
) -> None:
  """Adds the product of a tile [64, n] with a matrix to sums in registers."""
  for tile in _terms(problem, matrix, tiles):
    plgpu.wgmma(sums, factor, tile)
    plgpu.wgmma_wait(0)
  plgpu.commit_smem()  # all warps have read the tiles


def _terms(
  problem: Any, matrix: Any, tiles: Sequence[Any], *, is_loaded: bool = False
) -> Iterator[Any]:
  """The terms of a matrix in shared memory; the next may overwrite one."""
  terms = (False,) if is_one_term(matrix) else (False, True)
  if is_loaded:
    yield from tiles
    return
  for first in range(0, len(terms), len(tiles)):
    if first:
      plgpu.commit_smem()  # all warps have read the term before
    loaded = [*zip(tiles, terms[first:])]
    _load(problem, matrix, loaded)
    plgpu.commit_smem()
    yield from (tile for tile, _ in loaded)


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

  shape = left.shape[-1], right.shape[-1]
  return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))


def _load(problem: Any, matrix: Any, terms: Sequence[tuple[Any, bool]]) -> None:
  """Copies a matrix, or the remainder of its rounding, to tiles."""
  for rows, columns in _squares(terms[0][0].shape):
    part = read(problem.interpret, matrix.at[rows, columns])
    rounded = part if is_one_term(matrix) else _cut(part)
    for tile, is_remainder in terms:
      numbers = part - rounded if is_remainder else rounded
      tile[rows, columns] = numbers.astype(tile.dtype)


def _cut(numbers: jax.Array) -> jax.Array:
  """Numbers of float32 without the bits that bfloat16 lacks."""
  # Cheaper than rounding, and as the remainder is rounded, nearly as exact.
  bits = jax.lax.bitcast_convert_type(numbers, jnp.int32) & -(1 << 16)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _squares(shape: Sequence[int]) -> Iterator[tuple[Any, Any]]:
  """The places of the squares, up to [64, 64], of a matrix."""
  return itertools.product(*map(pieces, shape))


def read(interpret: Any, ref: Any, layout: Any = WGMMA) -> jax.Array:
  """An array of the device's or of shared memory, in registers."""
  if interpret:
    return ref[...].astype(jnp.float32)
  # `optimized` would refuse memory that is not shared.
  return plgpu.load(ref, (), layout=layout, optimized=False).astype(jnp.float32)
