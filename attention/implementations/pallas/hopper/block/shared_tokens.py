"""Gradients of arrays that entries of the leading axes share.

A block computes several of these entries, one after the other, and adds their
gradients in the device's memory. If too few blocks were left, they compute
parts of the entries, and XLA adds the results.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.implementations.pallas.hopper.tiles.parts import AT_ONCE, fewest


@dataclasses.dataclass(frozen=True)
class BatchSplit:
  """The entries of the leading axes, and those that a block computes."""

  leading: tuple[int, ...]
  shared: tuple[int, ...] = ()  # axes, along which a block has several entries
  parts: int = 1  # of these entries

  @property
  def of_block(self) -> int:
    """The number of entries of a block."""
    sizes = (self.leading[axis] for axis in self.shared)
    return math.prod(sizes) // self.parts

  @property
  def blocks(self) -> int:
    """The blocks of each row of tiles."""
    return math.prod(self.leading) // self.of_block

  def part(self, block: Any) -> Any:
    """The part of the entries that a block computes."""
    return jax.lax.rem(block, jnp.int32(self.parts))

  def entry(self, block: Any, number: Any) -> Any:
    """The entry of a block with this number, of all leading axes."""
    if not self.shared:
      return block
    kept = jax.lax.div(block, jnp.int32(self.parts))
    shared = self.part(block) * self.of_block + number
    entry, stride = jnp.int32(0), 1
    for axis, size in reversed([*enumerate(self.leading)]):
      numbers = shared if axis in self.shared else kept
      entry = entry + jax.lax.rem(numbers, jnp.int32(size)) * stride
      rest = jax.lax.div(numbers, jnp.int32(size))
      shared, kept = (rest, kept) if axis in self.shared else (shared, rest)
      stride *= size
    return entry


def batch_split(
  leading: Sequence[int], sizes: Sequence[int], rows: int
) -> BatchSplit:
  """The entries of blocks, for an array with these sizes of leading axes.

  The own tokens of blocks have so many rows of tiles.
  """
  leading = tuple(leading)
  shared = tuple(
    axis for axis, size in enumerate(sizes) if size == 1 and leading[axis] > 1
  )
  count = math.prod(leading[axis] for axis in shared)
  others = rows * math.prod(leading) // count

  def duration(parts):
    return -(-others * parts // AT_ONCE) * (count // parts)

  choices = [n for n in range(1, count + 1) if count % n == 0]
  return BatchSplit(leading, shared, fewest(choices, duration))
