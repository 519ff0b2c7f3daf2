"""Scales of tokens: the numbers by which their map multiplies them.

The kernels for Hopper GPUs multiply scores by the scales of both tokens instead
of mapping tokens. A kernel before the others computes those of keys, blocks of
queries compute their own, and the kernel of keys reads what they write.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.arrays import axes
from attention.implementations.blockwise.tiles import with_length
from attention.implementations.pallas.hopper.terms.token_maps import TokenMap
from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import SIDE

# The product of a greater one and of a score's gradient might overflow.
_LARGEST = 1e30


def of_tile(own_map: TokenMap, tile: jax.Array, *numbers) -> jax.Array:
  """The scales [64] of a tile of tokens; tokens below 1e-30 count as zero."""
  scales = own_map.function.scale(tile, *numbers)
  # That of a token with NaN is 0, and the token itself makes its scores NaN.
  return jnp.where(jnp.abs(scales) < _LARGEST, scales, 0.0)


def of_keys(own_map: TokenMap, key: jax.Array, interpret: Any) -> jax.Array:
  """The scales [..., S] of keys, without derivatives."""
  length = key.shape[-2]
  key = with_length(jax.lax.stop_gradient(key), axes.round_up(length, SIDE))
  *leading, padded, size = key.shape
  entries, device = math.prod(leading), Device(interpret=interpret)

  def run(tokens, result):
    entry, row = map(jax.lax.axis_index, ("entry", "row"))
    place = entry, pl.ds(row * SIDE, SIDE)
    result[place] = of_tile(own_map, device.read(tokens.at[place]))

  kernel = plgpu.kernel(
    run,
    out_type=jax.ShapeDtypeStruct((entries, padded), jnp.float32),
    grid=(entries, padded // SIDE),
    grid_names=("entry", "row"),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret or None,
  )
  scales = kernel(key.reshape(entries, padded, size))
  return scales.reshape(*leading, padded)[..., :length]
