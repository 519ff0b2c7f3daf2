"""The fast reciprocal of a Hopper GPU, for which JAX has no operation."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import TILE, WGMMA


@plgpu.inline_mgpu(
  arg_types=(WGMMA,),
  return_type=plgpu.ShapeDtypeStruct(TILE, jnp.float32, layout=WGMMA),
)
def _of_tile(context: Any, numbers: Any) -> Any:
  """One operation for each number; `1 / x` is correctly rounded, and slow."""
  del context
  code, float32 = "rcp.approx.ftz.f32 $0, $1;", ir.F32Type.get()

  def of_number(number, place):
    del place
    return llvm.inline_asm(float32, [number], code, "=f,f")

  return numbers.foreach(of_number, create_array=True)


def reciprocal(device: Device, numbers: jax.Array) -> jax.Array:
  """1 / x of a tile, with a relative error of 2^-23."""
  return 1.0 / numbers if device.interpret else _of_tile(numbers)
