"""Running sums of rows on Hopper GPUs, 64 numbers in each block.

A block sums all tiles before its own, entry by entry, and then the entries of
its own tile, as an array of pairs. The work grows with the square of the number
of tiles.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.tiles.device import (
  Device,
  compiler_params,
)
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  SIDE,
  TILE,
  WGMMA,
  down,
)


def running_sums(
  interpret: Any,
  function: Callable[..., Sequence[jax.Array]],
  *arrays: jax.Array,
  is_reversed: bool,
) -> list[jax.Array]:
  """The running sums of `function(*arrays)` along the last axis.

  The function receives tiles of the arrays. Unless `is_reversed`, there is one
  array, and its second argument is the sum of the row's absolute values.
  """
  shape, length = arrays[0].shape, arrays[0].shape[-1]
  entries, tiles = math.prod(shape[:-1]), -(-length // SIDE)
  rows = [each.reshape(entries, length) for each in arrays]
  rows = [jnp.pad(x, ((0, 0), (0, tiles * SIDE - length))) for x in rows]
  number = [jax.ShapeDtypeStruct((), arrays[0].dtype)]
  bounds = [] if is_reversed else number
  count = len(jax.eval_shape(function, *rows, *bounds))

  device = Device(interpret=interpret)

  def run(*refs):
    inputs, results = refs[: len(rows)], refs[len(rows) :]
    entry, own = map(jax.lax.axis_index, ("entry", "tile"))

    def tile(number):
      place = entry, pl.ds(number * SIDE, SIDE)
      return [device.read(each.at[place], BY_COLUMN) for each in inputs]

    zeros = device.cast(jnp.zeros((SIDE,), jnp.float32), BY_COLUMN)
    bounds = []
    if not is_reversed:
      magnitudes = jax.lax.fori_loop(
        0, tiles, lambda n, sums: sums + jnp.abs(tile(n)[0]), zeros
      )
      bounds = [jnp.sum(magnitudes)]

    def add(number, sums):
      parts = function(*tile(number), *bounds)
      return [total + part for total, part in zip(sums, parts, strict=True)]

    first, last = (own + 1, tiles) if is_reversed else (0, own)
    before = jax.lax.fori_loop(first, last, add, [zeros] * count)
    queries, keys = (
      device.cast(jax.lax.broadcasted_iota(jnp.int32, TILE, axis), WGMMA)
      for axis in (0, 1)
    )
    is_added = keys >= queries if is_reversed else keys <= queries
    parts = function(*tile(own), *bounds)
    for part, sums, result in zip(parts, before, results, strict=True):
      pairs = jnp.where(is_added, down(part, TILE), 0.0) + down(sums, TILE)
      result[entry, pl.ds(own * SIDE, SIDE)] = jnp.sum(pairs, axis=1)

  kernel = plgpu.kernel(
    run,
    out_type=[jax.ShapeDtypeStruct(rows[0].shape, jnp.float32)] * count,
    grid=(entries, tiles),
    grid_names=("entry", "tile"),
    compiler_params=compiler_params(),
    interpret=interpret or None,
  )
  results = kernel(*rows)
  return [each[:, :length].reshape(shape) for each in results]
