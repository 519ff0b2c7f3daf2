"""Tiles of numbers of pairs that a block keeps in shared memory.

Each thread reads what it has written. Its numbers lie at constant distances
from its first one, so that their addresses need one register.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import TILE, WGMMA

_THREADS = 128


def memory() -> Any:
  """Shared memory for a tile."""
  return plgpu.SMEM(TILE, jnp.float32)


def write(device: Device, tile: Any, numbers: jax.Array) -> None:
  """Writes the numbers of a tile."""
  if device.interpret:
    tile[...] = numbers
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
  def store(context, tile, numbers):
    del context
    for place, register in enumerate(numbers.registers.flat):
      llvm.store(register, _address(tile, place))

  store(tile, numbers)


def read(device: Device, tile: Any) -> jax.Array:
  """The numbers that were written."""
  if device.interpret:
    return tile[...]

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),),
    return_type=plgpu.ShapeDtypeStruct(TILE, jnp.float32, layout=WGMMA),
  )
  def load(context, tile):
    del context
    layout = WGMMA.to_mgpu()
    shape = layout.registers_shape(TILE)
    registers = [
      llvm.load(_pair(), _address(tile, place))
      for place in range(int(np.prod(shape)))
    ]
    array = np.asarray(registers, dtype=object).reshape(shape)
    return mgpu.FragmentedArray(
      _registers=array, _layout=layout, _is_signed=None
    )

  return load(tile)


def _pair() -> Any:
  """The type of a register of a tile: two numbers."""
  return ir.VectorType.get((2,), ir.F32Type.get())


def _address(tile: Any, place: int) -> Any:
  """The address of a register of this thread."""
  int32 = ir.IntegerType.get_signless(32)
  thread = arith.muli(mgpu.utils.thread_idx(), mgpu.utils.c(2, int32))
  thread = arith.addi(thread, mgpu.utils.c(2 * _THREADS * place, int32))
  pointer = mgpu.utils.memref_ptr(tile)
  return mgpu.utils.getelementptr(pointer, [thread], ir.F32Type.get())
