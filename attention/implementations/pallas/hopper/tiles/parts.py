"""Gradients of arrays that tokens share, as sums of the parts of blocks.

Each block of the kernels of gradients adds to a part of its own in the device's
memory. Another kernel adds the parts of all arrays.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.arrays.axes import round_up
from attention.implementations.pallas.hopper.tiles import matrices
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  TILE,
  WGMMA,
  Axes,
  Output,
)
from attention.implementations.pallas.operands import Operand

# The blocks that an H100 computes at once, one in each multiprocessor.
AT_ONCE = 132


def num_blocks(leading: Sequence[int], rows: int) -> int:
  """The blocks of each entry of the leading axes, of so many rows of tiles."""
  entries = math.prod(leading)

  def duration(blocks):
    return -(-entries * blocks // AT_ONCE) * -(-rows // blocks)

  return fewest(range(1, rows + 1), duration)


def fewest(choices: Sequence[int], duration: Callable[[int], int]) -> int:
  """The first choice that takes about as long as the best one."""
  limit = 1.05 * min(map(duration, choices))
  return next(each for each in choices if duration(each) <= limit)


def output(
  leading: Sequence[int], operand: Operand, core: Sequence[int], blocks: int
) -> Output:
  """The parts [K, n, core...] of the gradient of an array with K entries.

  The n parts are in the order of the other leading axes, then of the blocks.
  """
  entries = _entries(leading, operand)
  # A tile of parts is read at once.
  number = max(_number(leading, entries, blocks), SIDE)
  shape = jax.ShapeDtypeStruct((entries, number, *core), jnp.float32)
  return Output(shape, Axes.PARTS)


def _entries(leading: Sequence[int], operand: Operand) -> int:
  return math.prod(leading[axis] for axis in _kept(operand))


def _number(leading: Sequence[int], entries: int, blocks: int) -> int:
  """The parts of an entry of an array."""
  return blocks * math.prod(leading) // entries


def own_part(block: Any, name: str) -> Any:
  """The reference to the part of a block."""
  sizes, kept = block.problem.leading, _kept(block.problem.operands[name])
  summed = [axis for axis in range(len(sizes)) if axis not in kept]
  entry, number = (_flat(block, axes) for axes in (kept, summed))
  place = entry, number * block.num_blocks + jax.lax.axis_index("row")
  return block.direct[name].at[place]


def add_outer_products(
  block: Any, name: str, left: Any, right: Any, place: Any = None
) -> None:
  """Adds outer products of tiles, summed over tokens, to a block's part.

  It does nothing without such a part.
  """
  if name not in block.direct:
    return
  device, part = block.problem, own_part(block, name)
  part = part if place is None else part.at[place]
  for rows, columns in matrices.squares(part.shape):
    factors = device.transposed(left.at[:, rows]), right.at[:, columns]
    result = part.at[rows, columns]
    numbers = device.products(result.shape, [factors])
    matrices.add(device, result, numbers, block.is_first, WGMMA)


def _kept(operand: Operand) -> list[int]:
  """The leading axes of the context along which an array has entries."""
  return [axis for axis in operand.axes if axis is not None]


def _flat(block: Any, axes: Sequence[int]) -> Any:
  """The number of this entry among those of some leading axes."""
  sizes = block.problem.leading
  indices = block.leading(sizes)
  number = jnp.int32(0)
  for axis in axes:
    number = number * sizes[axis] + indices[axis]
  return number


class Slice(NamedTuple):
  """The elements of the gradient of an array to which a kernel adds."""

  core: tuple[int, ...]  # their shape
  first: int = 0


class Parts(NamedTuple):
  """The parts [K, n, core...] of the blocks of a kernel."""

  array: jax.Array
  blocks: int  # of an entry of the leading axes
  name: str  # of the array
  first: int  # element of its gradient


def sums(problem: Any, parts: Sequence[Parts]) -> dict[str, jax.Array]:
  """The gradients of which there are parts."""
  buckets = problem.buckets
  own = [each for each in parts if each.name in buckets]
  others = [each for each in parts if each.name not in buckets]
  of_buckets = {each.name: _sum_of_buckets(problem, each) for each in own}
  return of_buckets | _sums(problem, others)


def _sum_of_buckets(problem: Any, own: Parts) -> jax.Array:
  """The gradient of numbers of buckets, from parts with those of distances."""
  operand, buckets = problem.operands[own.name], problem.buckets[own.name]
  number = _number(problem.leading, own.array.shape[0], own.blocks)
  parts = own.array[:, None, :number, : buckets.size]
  places = np.arange(operand.core[0])[:, None, None]
  # XLA adds distances and parts in one operation.
  total = jnp.sum(jnp.where(buckets == places, parts, 0.0), axis=(-2, -1))
  return total.reshape(operand.array.shape)


def _sums(problem: Any, parts: Sequence[Parts]) -> dict[str, jax.Array]:
  """The gradients of which there are parts, in one kernel."""
  if not parts:
    return {}
  arrays = [each.array.reshape(*each.array.shape[:2], -1) for each in parts]
  operands = {each.name: problem.operands[each.name] for each in parts}
  sizes = {name: math.prod(each.core) for name, each in operands.items()}
  # A table is padded in the parts, and not in the sum.
  columns = [
    pl.cdiv(min(array.shape[-1], sizes[each.name]), SIDE)
    for array, each in zip(arrays, parts)
  ]
  entries = [_entries(problem.leading, each) for each in operands.values()]

  def run(*refs):
    results = dict(zip(operands, refs[len(arrays) :]))
    entry, column = map(jax.lax.axis_index, ("entry", "column"))
    first = 0
    for own, ref, count in zip(parts, refs, columns):
      is_own = (column >= first) & (column < first + count)
      write = functools.partial(
        _write_sum, problem, own, ref, results[own.name], entry, column - first
      )
      pl.when(is_own & (entry < ref.shape[0]))(write)
      first += count

  kernel = plgpu.kernel(
    run,
    out_type=tuple(
      jax.ShapeDtypeStruct((number, round_up(size, SIDE)), jnp.float32)
      for number, size in zip(entries, sizes.values())
    ),
    grid=(max(entries), sum(columns)),
    grid_names=("entry", "column"),
    interpret=problem.interpret or None,
  )
  return {
    name: each[:, : sizes[name]].reshape(operands[name].array.shape)
    for name, each in zip(operands, kernel(*arrays))
  }


def _write_sum(
  problem: Any, own: Parts, ref: Any, result: Any, entry: Any, column: Any
) -> None:
  """Writes the sums of 64 columns of parts, as an array [K, n, m]."""
  columns = pl.ds(column * SIDE, SIDE)
  number = _number(problem.leading, ref.shape[0], own.blocks)
  places = problem.cast(jax.lax.broadcasted_iota(jnp.int32, TILE, 0), WGMMA)

  def add(step, total):
    # The last tile of parts starts earlier if there is no whole one.
    start = jnp.minimum(step * SIDE, ref.shape[1] - SIDE)
    tile = problem.read(ref.at[entry, pl.ds(start, SIDE), columns])
    is_new = (places + start >= step * SIDE) & (places + start < number)
    return total + jnp.where(is_new, tile, 0.0)

  zeros = problem.zeros(TILE)
  total = jax.lax.fori_loop(0, pl.cdiv(number, SIDE), add, zeros)
  place = pl.ds(own.first + column * SIDE, SIDE)
  result[entry, place] = jnp.sum(total, axis=0)
