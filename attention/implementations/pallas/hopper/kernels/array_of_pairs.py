"""The gradient of a bias with a number for each pair, for Hopper GPUs.

The kernel of queries writes the gradients of a tile's scores to the device's
memory. A block computes the entries of the leading axes that share the bias,
one after the other: the first sets the numbers of a row of tiles, to which the
others add. If too few blocks were left, they compute parts of the entries, and
XLA adds the results.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.block.shared_tokens import (
  BatchSplit,
  batch_split,
)
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  TILE,
  WGMMA,
  Axes,
  Output,
)
from attention.implementations.pallas.hopper.tiles.matrices import add
from attention.implementations.pallas.operands import Kind, Operand


def names_of(problem: Any, names: Iterable[str]) -> list[str]:
  """The names of arrays of pairs."""
  return [n for n in names if problem.differentiable[n].kind is Kind.TILE]


def groups(problem: Any, names: Iterable[str]) -> list[list[str]]:
  """The names of arrays of pairs, by their leading axes; at least one group.

  The entries that a block adds share all arrays, so each group has a kernel.
  """
  found: dict[Any, list[str]] = {}
  for name in names_of(problem, names):
    sizes = _sizes(problem, problem.differentiable[name])
    found.setdefault(sizes, []).append(name)
  return [*found.values()] or [[]]


def entries(problem: Any, names: Sequence[str]) -> BatchSplit:
  """The entries of the leading axes that a block of queries computes."""
  if not names:
    return BatchSplit(problem.leading)
  sizes = _sizes(problem, problem.differentiable[names[0]])
  return batch_split(problem.leading, sizes, len(problem.tiles))


def outputs(
  problem: Any, names: Sequence[str], entries: BatchSplit
) -> dict[str, Output]:
  """The parts [n, ..., T, S] of the gradients of arrays."""

  def output(operand):
    sizes = _sizes(problem, operand)
    dtype = jnp.dtype(jnp.float32)
    if entries.of_block == 1 and entries.parts == 1:
      dtype = operand.array.dtype
    shape = (entries.parts, *sizes, *problem.padded_lengths)
    return Output(jax.ShapeDtypeStruct(shape, dtype), Axes.PAIRS)

  return {name: output(problem.differentiable[name]) for name in names}


def _sizes(problem: Any, operand: Operand) -> tuple[int, ...]:
  """The array's sizes along all leading axes of the context."""
  every = enumerate(problem.leading)
  return tuple(size if axis in operand.axes else 1 for axis, size in every)


def total(parts: jax.Array, operand: Operand) -> jax.Array:
  """The gradient of an array, from its parts."""
  gradient = parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0)
  queries, keys = operand.core
  return gradient[..., :queries, :keys].reshape(operand.array.shape)


def of_block(block: Block) -> list[str]:
  """The names of the arrays of pairs whose gradients a block writes."""
  return names_of(block.problem, block.direct)


def clear_hidden(block: Block) -> None:
  """Sets the tiles to zero that a block of queries does not visit."""
  names, tiles = of_block(block), block.problem.tiles
  if not names or tiles.all():
    return
  zeros = block.problem.zeros(TILE)

  def clear(column, state):
    for name in names:
      place = _place(block, name, column * SIDE)
      place[...] = zeros.astype(place.dtype)
    return state

  first, end = (block.bounds[2 * block.row + n] for n in range(2))

  @pl.when(block.is_first_entry)
  def _():
    jax.lax.fori_loop(0, first, clear, None)
    jax.lax.fori_loop(end, tiles.shape[1], clear, None)


def add_tile(block: Block, name: str, numbers: jax.Array, start: Any) -> None:
  """Adds the gradients of the tile of keys from `start` on."""
  place = _place(block, name, start)
  numbers = numbers.astype(place.dtype)
  add(block.problem, place, numbers, block.is_first_entry, WGMMA)


def _place(block: Block, name: str, start: Any) -> Any:
  """The reference to a tile of the gradient of an array."""
  own_part = block.direct[name].at[block.part]
  return block.of_array(own_part, Axes.PAIRS, start)
