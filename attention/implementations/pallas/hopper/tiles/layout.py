"""Tiles of arrays in the kernels for Hopper GPUs, 64 tokens at a time."""

import enum
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SIDE = 64
TILE = (SIDE, SIDE)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
# The most numbers along an axis that are copied at once.
_COPIED = 256


class Axes(enum.Enum):
  """The axes of an array after the leading ones; True is an axis of tokens."""

  TOKENS = (True, False)  # [..., T, D]
  CHANNELS = (False, True)  # [A, ..., T], as XLA writes mapped tokens
  STAGED = (True, False, "transposed")  # [..., T, D], a tile is [D, 64]
  PAIRS = (True, True)  # [..., T, S]
  ROWS = (True,)  # [..., T]
  WHOLE = ()  # [..., n], read whole
  MATRIX = (False, False)  # [..., D, A], which blocks read by parts
  SUMS = (True, False, "sums")  # [n, ..., T, D], to which a block adds
  PARTS = (False,)  # [K, n, ...], of which a block writes its own part
  NUMBERS = None  # [..., n], of which a block reads or writes single numbers

  @property
  def is_tile(self) -> bool:
    """Whether a block copies a tile of the array to or from shared memory."""
    return self not in (Axes.MATRIX, Axes.NUMBERS, Axes.PARTS)

  @property
  def is_direct(self) -> bool:
    """Whether a block writes the array's numbers from registers."""
    return self in (Axes.PAIRS, Axes.PARTS)


class Input(NamedTuple):
  """An array that a kernel reads, of queries, of keys, or of neither."""

  array: Any
  axes: Axes
  of_keys: bool | None = None


class Output(NamedTuple):
  """An array that a kernel writes for its own tokens."""

  shape: jax.ShapeDtypeStruct
  axes: Axes


class Kernel(NamedTuple):
  """What a kernel reads and writes.

  Each of so many `blocks` computes some rows of tiles. The first one sets the
  block's parts of sums, to which the others add. So does the first of the
  entries of the leading axes that a block computes.
  """

  inputs: Mapping[str, Input]
  outputs: Mapping[str, Output]
  blocks: int
  entries: Any  # see `BatchSplit`
  own: str = "query"  # the tokens of a block, which visits the others, or "key"
  of_gradients: bool = False


def parts_of_copy(ref: Any, axes: Axes) -> list[Any]:
  """The parts of a tile that are copied one after the other; None is all."""
  if axes is not Axes.WHOLE or ref.shape[-1] <= _COPIED:
    return [None]
  starts = range(0, ref.shape[-1], _COPIED)
  return [pl.ds(n, min(_COPIED, ref.shape[-1] - n)) for n in starts]


def tile_memory(ref: Any, axes: Axes) -> Any:
  """Shared memory for a tile of an array."""
  shapes = {
    Axes.TOKENS: (SIDE, ref.shape[-1]),
    Axes.SUMS: (SIDE, ref.shape[-1]),
    Axes.CHANNELS: (ref.shape[0], SIDE),
    Axes.STAGED: (ref.shape[-1], SIDE),
    Axes.PAIRS: TILE,
    Axes.ROWS: (SIDE,),
    Axes.NUMBERS: (SIDE,),
    Axes.WHOLE: ref.shape[-1:],
  }
  dtype = jnp.float32 if axes is Axes.STAGED else ref.dtype
  is_factor = axes is Axes.TOKENS and dtype.itemsize == 2
  is_swizzled = is_factor or axes is Axes.PAIRS
  return (swizzled if is_swizzled else plgpu.SMEM)(shapes[axes], dtype)


def swizzled(
  shape: tuple[int, int], dtype: Any, like: int | None = None
) -> Any:
  """Shared memory [1, n, m] that is read in the layout of registers, `WGMMA`.

  Both factors of a product need the same order in memory: that of tiles with
  `like` columns. See `Memory.at` for the axis of size 1.
  """
  # Rows of 32, 64 or 128 bytes, in the order that tensor cores read.
  size = jnp.dtype(dtype).itemsize
  row = math.gcd(128, size * (like or shape[-1]))
  transforms = (
    plgpu.TilingTransform((8, row // size)),
    plgpu.SwizzleTransform(row),
  )
  return plgpu.SMEM((1, *shape), dtype, transforms=transforms)


def pieces(size: int) -> list[Any]:
  """The places of up to 64 columns, of so many."""
  starts = range(0, size, SIDE)
  return [pl.ds(start, min(SIDE, size - start)) for start in starts]


def across(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[n] to [n, m]."""
  return jax.lax.broadcast_in_dim(column, shape, (0,))


def down(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[m] to [n, m]."""
  return jax.lax.broadcast_in_dim(row, shape, (1,))
