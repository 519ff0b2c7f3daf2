"""Calls of the kernels for Hopper GPUs: their grid, memory and results."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block import Block, Memory
from attention.implementations.pallas.hopper.tiles import (
  BY_ROW,
  SIDE,
  TILE,
  Axes,
  Input,
  Output,
  swizzled,
  tile_memory,
)


def _write(
  block: Block, results: Mapping[str, Any], outputs: Mapping[str, Output]
) -> None:
  """Copies the results of a block to the device's memory."""
  written = {
    name: block.staged(tile) if outputs[name].axes is Axes.STAGED else tile
    for name, tile in block.results.items()
  }
  for name, ref in results.items():
    if outputs[name].axes is Axes.NUMBERS:  # a sum over own tokens
      parts = block.problem.cast(written.pop(name)[...], BY_ROW)
      place = (*block.leading(ref.shape[:-1]), block.row)
      ref[place] = jnp.sum(parts, axis=0)
  plgpu.commit_smem()
  for name in written:
    ref = results[name]
    place = block.place(ref, outputs[name].axes, block.row * SIDE)
    plgpu.copy_smem_to_gmem(written[name], place)
  plgpu.wait_smem_to_gmem(0)


def launch(
  problem: Any,
  compute: Callable[[Block], None],
  visible: np.ndarray,
  inputs: Mapping[str, Input],
  outputs: Mapping[str, Output],
  *,
  are_keys_own: bool = False,
  of_gradients: bool = False,
  finish: Callable[[Block, Any], None] | None = None,
) -> dict[str, jax.Array]:
  """Runs a kernel: compute(block) for each row of tiles and leading entry.

  Results with the axes `MATRIX` are sums over rows of tiles, [..., n, D, A].
  Each of n blocks computes several rows, and adds to its part after each one,
  by finish(block, is_first).
  """
  blocks = _num_blocks(len(visible), outputs)

  def run(bounds, *refs):
    references = {
      name: each._replace(array=ref)
      for (name, each), ref in zip(inputs.items(), refs)
    }
    written = dict(zip(outputs, refs[len(inputs) :]))
    direct = {
      name: written.pop(name)
      for name, each in outputs.items()
      if each.axes in (Axes.MATRIX, Axes.MAPPED)
    }

    def compute_row(number, held):
      block = Block(
        problem=problem,
        are_keys_own=are_keys_own,
        bounds=bounds,
        inputs=references,
        direct=direct,
        row=jax.lax.axis_index("row") + number * blocks,
        entry=jax.lax.axis_index("leading"),
        **held,
      )
      block.load(True, block.row * SIDE)
      compute(block)
      _write(block, written, outputs)
      if finish is not None:
        finish(block, number == 0)

    results = {
      name: tile_memory(ref, outputs[name].axes)
      for name, ref in written.items()
    }
    memory = _memory(problem, are_keys_own, of_gradients, references, results)

    def scoped(*parts):
      held = dict(zip(vars(memory), parts))

      def compute_next(number, state):
        compute_row(number, held)
        plgpu.commit_smem()  # the next row overwrites the tiles
        return state

      if blocks == len(visible):
        compute_row(0, held)
      else:
        rows = pl.cdiv(len(visible) - jax.lax.axis_index("row"), blocks)
        jax.lax.fori_loop(0, rows, compute_next, None)

    pl.run_scoped(scoped, *vars(memory).values())

  kernel = plgpu.kernel(
    run,
    out_type=tuple(each.shape for each in outputs.values()),
    grid=(blocks, math.prod(problem.leading)),
    grid_names=("row", "leading"),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=problem.interpret or None,
  )
  bounds = jnp.asarray(_bounds(visible != 0).ravel())
  arrays = [each.array for each in inputs.values()]
  return dict(zip(outputs, kernel(bounds, *arrays)))


def _memory(
  problem: Any,
  are_keys_own: bool,
  of_gradients: bool,
  inputs: Mapping[str, Input],
  results: Mapping[str, Any],
) -> Memory:
  """The shared memory of a block."""
  loaded = {name: each for name, each in inputs.items() if each.axes.is_tile}
  others = sum(each.of_keys is (not are_keys_own) for each in loaded.values())
  factor = swizzled(TILE, inputs["value"].array.dtype)
  has_products = of_gradients and problem.changed is not None
  tiles = {
    name: tile_memory(each.array, each.axes) for name, each in loaded.items()
  }
  own, map_factor, of_mapped = "key" if are_keys_own else "query", None, None
  if own in problem.maps:
    tiles[own], tokens = tiles["unmapped"], inputs["unmapped"].array
    matrices = problem.maps[own].matrices
    map_factor = tiles[own] if matrices else None
    if of_gradients:
      dtype = tokens.dtype if matrices else jnp.float32
      of_mapped = swizzled((SIDE, tokens.shape[-1]), dtype)
    for name in matrices:
      tiles[name] = swizzled(inputs[name].array.shape[-2:], tokens.dtype)
  return Memory(
    tiles,
    results,
    factors=[factor] * (2 if are_keys_own else 1),
    products=swizzled(TILE, jnp.float32) if has_products else None,
    barriers=[
      plgpu.Barrier(num_arrivals=others),
      plgpu.Barrier(num_arrivals=len(loaded) - others),
    ],
    staging=_staging(inputs.get("query")),
    scratch=() if problem.channels is None else problem.channels.scratch(),
    map_factor=map_factor,
    of_mapped=of_mapped,
    marks=plgpu.SMEM((SIDE,), jnp.float32) if of_gradients else None,
  )


def _num_blocks(rows: int, outputs: Mapping[str, Output]) -> int:
  """The blocks of an entry of the leading axes, of so many rows of tiles."""
  parts = [
    each.shape.shape[-3]
    for each in outputs.values()
    if each.axes is Axes.MATRIX
  ]
  return min([rows, *parts])


def _bounds(visible: np.ndarray) -> np.ndarray:
  """The first visited column of tiles and the end, of each row of tiles."""
  first = np.argmax(visible, axis=1)
  last = visible.shape[1] - np.argmax(visible[:, ::-1], axis=1)
  end = np.where(visible.any(axis=1), last, first)
  return np.stack([first, end], axis=1).astype(np.int32)


def _staging(queries: Input | None) -> Any:
  """Shared memory for a tile of staged tokens, if there are any."""
  if queries is None or queries.axes is not Axes.STAGED:
    return None
  return tile_memory(queries.array, Axes.TOKENS)
