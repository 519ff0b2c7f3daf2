"""Operations of a GPU on tiles, and what the interpreter has in their place."""

import dataclasses
import functools
import inspect
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.tiles.layout import (
  BY_ROW,
  SIDE,
  WGMMA,
)

_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
# JAX 0.10 loads at an index, here that of the whole array.
_INDEX = ((),) if "idx" in inspect.signature(plgpu.load).parameters else ()


def compiler_params(**options: Any) -> plgpu.CompilerParams:
  """The parameters of a kernel whose program chooses the layouts of arrays.

  The default of JAX 0.12 infers them.
  """
  semantics = plgpu.LoweringSemantics.Lane
  return plgpu.CompilerParams(lowering_semantics=semantics, **options)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Device:
  """A Hopper GPU, or its interpreter with the parameters `interpret`."""

  interpret: Any

  def cast(self, array: jax.Array, layout: Any) -> jax.Array:
    """An array in a layout of registers; the interpreter has none."""
    return array if self.interpret else plgpu.layout_cast(array, layout)

  def zeros(self, shape: tuple[int, ...] = (SIDE,)) -> jax.Array:
    """Zeros for tokens, or for pairs, in registers."""
    layout = BY_ROW if len(shape) == 1 else WGMMA
    return self.cast(jnp.zeros(shape, jnp.float32), layout)

  def transposed(self, tile: Any) -> Any:
    """A tile of shared memory; in the interpreter an array."""
    return tile[...].T if self.interpret else tile.transpose((1, 0))

  def read(
    self, ref: Any, layout: Any = WGMMA, dtype: Any = jnp.float32
  ) -> jax.Array:
    """An array of the device's or of shared memory, in registers."""
    if self.interpret:
      return ref[...].astype(dtype)
    # `optimized` would refuse conflicts of banks and the device's memory.
    numbers = plgpu.load(ref, *_INDEX, layout=layout, optimized=False)
    return numbers.astype(dtype)

  def write(self, ref: Any, array: jax.Array) -> None:
    """Writes an array in registers, also with conflicts of banks."""
    store = getattr(plgpu, "store", None)  # JAX 0.10 lacks it
    if self.interpret or store is None:
      ref[...] = array
    else:
      store(ref, array, optimized=False)

  def read_transposed(self, tile: Any, dtype: Any = jnp.float32) -> jax.Array:
    """A tile [n, 64] of shared memory as tokens [64, n]."""
    tokens = self.read(self.transposed(tile), _TRANSPOSED, dtype)
    return self.cast(tokens, WGMMA)

  def write_transposed(self, tile: Any, tokens: jax.Array) -> None:
    """Writes tokens [64, n] to a tile [n, 64] of shared memory."""
    if self.interpret:
      tile[...] = tokens.T
    else:
      self.write(self.transposed(tile), self.cast(tokens, _TRANSPOSED))

  def products(
    self,
    shape: tuple[int, int],
    factors: Iterable[tuple[Any, Any]],
    *,
    waits: bool = False,
  ) -> jax.Array:
    """The sum of the products of tiles, [n, m].

    If it `waits`, each product has read its factors before the next are made.
    """
    if self.interpret:  # CPUs lack products of 16 bits
      products = (
        left[...].astype(jnp.float32) @ right[...].astype(jnp.float32)
        for left, right in factors
      )
      return functools.reduce(jnp.add, products)

    def compute(sums):
      for left, right in factors:
        plgpu.wgmma(sums, left, right)
        if waits:
          plgpu.wgmma_wait(0)
      return sums[...]

    return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))
