"""Calls of the kernels for Hopper GPUs: their grid, memory and results."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block import memory
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.block.memory import Memory
from attention.implementations.pallas.hopper.tiles import matrices
from attention.implementations.pallas.hopper.tiles.device import compiler_params
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_ROW,
  SIDE,
  WGMMA,
  Axes,
  Input,
  Kernel,
  Output,
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
      numbers = block.problem.cast(written.pop(name)[...], BY_ROW)
      place = (*block.leading(ref.shape[:-1]), block.row)
      ref[place] = jnp.sum(numbers, axis=0)
    if outputs[name].axes is Axes.SUMS:
      numbers = block.problem.read(written.pop(name))
      place = block.of_array(ref.at[block.part], Axes.TOKENS, block.row * SIDE)
      matrices.add(block.problem, place, numbers, block.is_first_entry, WGMMA)
  plgpu.commit_smem()
  for name in written:
    ref = results[name]
    place = block.of_array(ref, outputs[name].axes, block.row * SIDE)
    plgpu.copy_smem_to_gmem(written[name], place)
  plgpu.wait_smem_to_gmem(0)


def _references(
  kernel: Kernel, refs: Any
) -> tuple[dict[str, Input], dict[str, Any], dict[str, Any]]:
  """References by name: inputs, outputs with a tile, and other outputs."""
  read = {
    name: each._replace(array=ref)
    for (name, each), ref in zip(kernel.inputs.items(), refs)
  }
  written = dict(zip(kernel.outputs, refs[len(kernel.inputs) :]))
  direct = {
    name: written.pop(name)
    for name, each in kernel.outputs.items()
    if each.axes.is_direct
  }
  return read, written, direct


def launch(
  problem: Any, kernel: Kernel, compute: Callable[[Block], None]
) -> dict[str, jax.Array]:
  """The outputs: compute(block) for each row and leading entry."""
  visible = problem.tiles.T if kernel.own == "key" else problem.tiles
  blocks, entries = kernel.blocks, kernel.entries

  def run(bounds, *refs):
    inputs, written, direct = _references(kernel, refs)
    own = jax.lax.axis_index("leading")

    def compute_row(block_memory, number, row, is_first):
      block = Block(
        memory=block_memory,
        problem=problem,
        own=kernel.own,
        bounds=bounds,
        inputs=inputs,
        direct=direct,
        num_blocks=blocks,
        part=entries.part(own),
        is_first_entry=number == 0,
        is_first=is_first,
        row=row,
        entry=entries.entry(own, number),
        **vars(block_memory),
      ).with_new_addresses()
      block.load(True, block.row * SIDE)
      compute(block)
      block = block.with_new_addresses()
      _write(block, written, kernel.outputs)

    def compute_entries(block_memory):
      def compute_entry(number):
        compute_in_memory = functools.partial(compute_row, block_memory, number)
        _for_each_row(len(visible), blocks, compute_in_memory)

      _for_each_entry(entries.of_block, compute_entry)

    def scoped(*refs):
      block_memory = memory.with_shared(problem, kernel, Memory(*refs))
      block_memory.zero[0] = jnp.int32(0)
      plgpu.commit_smem()
      compute_entries(block_memory)

    pl.run_scoped(scoped, *vars(memory.of_block(problem, kernel)).values())

  call = plgpu.kernel(
    run,
    out_type=tuple(each.shape for each in kernel.outputs.values()),
    grid=(blocks, entries.blocks),
    grid_names=("row", "leading"),
    compiler_params=compiler_params(approx_math=True),
    interpret=problem.interpret or None,
  )
  bounds = jnp.asarray(_bounds(visible != 0).ravel())
  arrays = [each.array for each in kernel.inputs.values()]
  return dict(zip(kernel.outputs, call(bounds, *arrays)))


def _for_each_entry(number: int, compute: Callable[[Any], None]) -> None:
  """Calls compute(n) for so many entries of the leading axes."""
  if number == 1:
    compute(0)
    return

  def compute_next(entry, state):
    compute(entry)
    plgpu.commit_smem()  # the next entry overwrites the tiles
    return state

  jax.lax.fori_loop(0, number, compute_next, None)


def _for_each_row(
  rows: int, blocks: int, compute: Callable[[Any, Any], None]
) -> None:
  """Calls compute(row, is_first) for the rows of a block."""
  if blocks == rows:
    compute(jax.lax.axis_index("row"), True)
    return

  def compute_next(first):
    row = _row(first, blocks)

    @pl.when(row < rows)
    def _():
      compute(row, first == 0)
      plgpu.commit_smem()  # the next row overwrites the tiles

    return first + blocks

  # A counter of rounds, and its product, would need two registers.
  jax.lax.while_loop(lambda first: first < rows, compute_next, jnp.int32(0))


def _row(first: Any, blocks: int) -> Any:
  """The row of a block in the round from this row on, in alternate directions.

  With a causal mask all blocks then have as many tiles.
  """
  block = jax.lax.axis_index("row")
  is_odd = jax.lax.rem(jax.lax.div(first, blocks), jnp.int32(2)) == 1
  return first + jnp.where(is_odd, blocks - 1 - block, block)


def _bounds(visible: np.ndarray) -> np.ndarray:
  """The first visited column of tiles and the end, of each row of tiles."""
  first = np.argmax(visible, axis=1)
  last = visible.shape[1] - np.argmax(visible[:, ::-1], axis=1)
  end = np.where(visible.any(axis=1), last, first)
  return np.stack([first, end], axis=1).astype(np.int32)
