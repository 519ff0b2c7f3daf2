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

from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
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


def load(device: Device, matrix: Any, *tiles: Any) -> None:
  """Copies the terms of a matrix to shared memory, for several products."""
  _load(device, matrix, [*zip(tiles, (False, True))])
  plgpu.commit_smem()


def product(
  device: Device,
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
    rows = pl.ds(0, columns)
    return device.transposed(tile.at[rows]) if is_transposed else tile

  terms = _terms(device, matrix, tiles, is_loaded=is_loaded)
  factors = ((factor, right(each)) for each in terms)
  return device.products((SIDE, columns), factors, waits=True)


def add_product(
  device: Device, sums: Any, factor: Any, matrix: Any, *tiles: Any
) -> None:
  """Adds the product of a tile [64, n] with a matrix to sums in registers."""
  for tile in _terms(device, matrix, tiles):
    plgpu.wgmma(sums, factor, tile)
    plgpu.wgmma_wait(0)
  plgpu.commit_smem()  # all warps have read the tiles


def _terms(
  device: Device, matrix: Any, tiles: Sequence[Any], *, is_loaded: bool = False
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
    _load(device, matrix, loaded)
    plgpu.commit_smem()
    yield from (tile for tile, _ in loaded)


def add(
  device: Device, result: Any, numbers: jax.Array, is_first: Any, layout: Any
) -> None:
  """Adds to an array of the device's memory, or sets it the first time."""
  if is_first is not True:
    before = device.read(result, layout)
    numbers = numbers + jnp.where(is_first, 0.0, before)
  result[...] = numbers


def _load(
  device: Device, matrix: Any, terms: Sequence[tuple[Any, bool]]
) -> None:
  """Copies a matrix, or the remainder of its rounding, to tiles."""
  for rows, columns in squares(terms[0][0].shape):
    part = device.read(matrix.at[rows, columns])
    rounded = part if is_one_term(matrix) else _cut(part)
    for tile, is_remainder in terms:
      numbers = part - rounded if is_remainder else rounded
      tile[rows, columns] = numbers.astype(tile.dtype)


def _cut(numbers: jax.Array) -> jax.Array:
  """Numbers of float32 without the bits that bfloat16 lacks."""
  # Cheaper than rounding, and as the remainder is rounded, nearly as exact.
  bits = jax.lax.bitcast_convert_type(numbers, jnp.int32) & -(1 << 16)
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def squares(shape: Sequence[int]) -> Iterator[tuple[Any, Any]]:
  """The places of the squares, up to [64, 64], of a matrix."""
  return itertools.product(*map(pieces, shape))
