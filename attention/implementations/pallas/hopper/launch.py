"""Calls of the kernels for Hopper GPUs: their grid, memory and results."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
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

# The results that are sums over channels, or made of them.
_SUMS = "tokens", "weight"


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
      numbers = block.problem.cast(written.pop(name)[...], BY_ROW)
      place = (*block.leading(ref.shape[:-1]), block.row)
      ref[place] = jnp.sum(numbers, axis=0)
  plgpu.commit_smem()
  for name in written:
    ref = results[name]
    place = block.of_array(ref, outputs[name].axes, block.row * SIDE)
    plgpu.copy_smem_to_gmem(written[name], place)
  plgpu.wait_smem_to_gmem(0)


def launch(
  problem: Any,
  compute: Callable[[Block, Any], None],
  visible: np.ndarray,
  inputs: Mapping[str, Input],
  outputs: Mapping[str, Output],
  *,
  are_keys_own: bool = False,
  of_gradients: bool = False,
  blocks: int | None = None,
) -> dict[str, jax.Array]:
  """Runs a kernel: compute(block, is_first) for each row and leading entry.

  Each of so many `blocks` computes several rows of tiles; None is one row each.
  The first one sets the block's parts of sums, to which the others add.
  """
  blocks = len(visible) if blocks is None else blocks
  replaced = _replaced(problem, inputs, outputs, are_keys_own=are_keys_own)

  def run(bounds, *refs):
    references = {
      name: each._replace(array=ref)
      for (name, each), ref in zip(inputs.items(), refs)
    }
    written = dict(zip(outputs, refs[len(inputs) :]))
    direct = {
      name: written.pop(name)
      for name, each in outputs.items()
      if each.axes is Axes.PARTS
    }

    def compute_row(memory, row, is_first):
      block = Block(
        memory=memory,
        problem=problem,
        are_keys_own=are_keys_own,
        bounds=bounds,
        inputs=references,
        direct=direct,
        num_blocks=blocks,
        row=row,
        entry=jax.lax.axis_index("leading"),
        **vars(memory),
      ).with_new_addresses()
      block.load(True, block.row * SIDE)
      compute(block, is_first)
      _write(block.with_new_addresses(), written, outputs)

    results = {
      name: tile_memory(ref, outputs[name].axes)
      for name, ref in written.items()
      if name not in replaced
    }
    sums = [name for name in _SUMS if name in outputs]
    memory = _memory(
      problem, are_keys_own, of_gradients, references, results, sums
    )

    def scoped(*refs):
      held = dict(zip(vars(memory), refs))
      results, tiles = held["results"], held["tiles"]
      if problem.channels is not None and problem.projections is None:
        held["channel_sums"] = {n: results[n] for n in _SUMS if n in results}
      over = {name: tiles[each] for name, each in replaced.items()}
      held["results"] = results | over

      held["zero"][0] = jnp.int32(0)
      plgpu.commit_smem()
      compute_held = functools.partial(compute_row, Memory(**held))
      _for_each_row(len(visible), blocks, compute_held)

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


def _replaced(
  problem: Any,
  inputs: Mapping[str, Input],
  outputs: Mapping[str, Output],
  *,
  are_keys_own: bool,
) -> dict[str, str]:
  """The result that is written over a tile that no longer is read, by name."""
  own = "key" if are_keys_own else "query"
  if problem.projections is not None:
    tiles = {"context": own, "tokens": own}
  elif "unmapped" in inputs:
    tiles = {"context": "unmapped", "tokens": "remainder"}
  else:
    return {}
  tokens = inputs.get("unmapped", inputs.get(own)).array
  return {
    name: tile
    for name, tile in tiles.items()
    if name in outputs
    and outputs[name].shape.dtype == tokens.dtype
    and outputs[name].shape.shape[-1] == tokens.shape[-1]
  }


def _for_each_row(
  rows: int, blocks: int, compute: Callable[[Any, Any], None]
) -> None:
  """Calls compute(row, is_first) for the rows of a block."""
  if blocks == rows:
    compute(jax.lax.axis_index("row"), True)
    return

  def compute_next(number, state):
    row = _row(number, blocks)

    @pl.when(row < rows)
    def _():
      compute(row, number == 0)
      plgpu.commit_smem()  # the next row overwrites the tiles

    return state

  jax.lax.fori_loop(0, pl.cdiv(rows, blocks), compute_next, None)


def _row(number: Any, blocks: int) -> Any:
  """The row of a block in a round, in alternate directions.

  With a causal mask all blocks then have as many tiles.
  """
  block = jax.lax.axis_index("row")
  is_odd = jax.lax.rem(number, jnp.int32(2)) == 1
  return number * blocks + jnp.where(is_odd, blocks - 1 - block, block)


def _memory(
  problem: Any,
  are_keys_own: bool,
  of_gradients: bool,
  inputs: Mapping[str, Input],
  results: Mapping[str, Any],
  channel_sums: Sequence[str],
) -> Memory:
  """The shared memory of a block; the sums are of projected channels."""
  loaded = {name: each for name, each in inputs.items() if each.axes.is_tile}
  others = sum(each.of_keys is (not are_keys_own) for each in loaded.values())
  factor = swizzled(TILE, inputs["value"].array.dtype)
  has_products = of_gradients and problem.changed is not None
  tiles = {
    name: tile_memory(each.array, each.axes) for name, each in loaded.items()
  }
  own, map_factor, of_mapped = "key" if are_keys_own else "query", None, None
  own_map, own_scale = problem.maps.get(own), None
  if own_map is not None and own_map.is_scaling:
    own_scale = None if are_keys_own else plgpu.SMEM((SIDE,), jnp.float32)
    if of_gradients:
      size = inputs[own].array.shape[-1]
      of_mapped = swizzled((SIDE, size), jnp.float32)
  elif own_map is not None:
    tiles[own] = tiles["remainder"] = tiles["unmapped"]
    tokens, matrices = inputs["unmapped"].array, own_map.matrices
    map_factor = tiles[own] if matrices else None
    if of_gradients:
      dtype = tokens.dtype if matrices else jnp.float32
      of_mapped = swizzled((SIDE, tokens.shape[-1]), dtype)
    for name in matrices:
      tiles[name] = swizzled(inputs[name].array.shape[-2:], tokens.dtype)
  sums = {}
  if problem.projections is not None:
    tokens = [inputs[name].array for name in ("query", "key")]
    channels, dtype = problem.channels.channels, tokens[0].dtype
    features = max(each.shape[-1] for each in tokens)
    tiles["projection"] = swizzled((features, channels), dtype)
    if of_gradients:
      of_mapped = swizzled((SIDE, channels), dtype)
      sum_tile = plgpu.SMEM((channels, SIDE), jnp.float32)
      sums = dict.fromkeys(channel_sums, sum_tile)
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
    channel_sums=sums,
    marks=plgpu.SMEM((SIDE,), jnp.float32) if of_gradients else None,
    own_scale=own_scale,
    zero=plgpu.SMEM((1,), jnp.int32),
  )


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
