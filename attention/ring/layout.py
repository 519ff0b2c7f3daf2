"""How a sequence is divided among the devices of a ring.

A rotation step moves one block of each chunk.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.arrays.meshes import is_on_accelerator
from attention.masks.tile_visibility import Ranges, visibility
from attention.masks.types import Mask
from attention.positional.base import FULL
from attention.ring.order import Order, chunk_of, num_chunks

# The most tokens of a block on CPUs, so that the scores of a pair of blocks are
# not larger than a shard of tokens. Accelerators start operations for each
# pair, so a block is a whole chunk there, and the implementation bounds the
# memory.
_BLOCK_SIZE = 256


@dataclasses.dataclass(frozen=True)
class ShardLayout:
  """A shard of `chunks` chunks, each of `blocks_per_chunk` blocks of `size`."""

  chunks: int
  blocks_per_chunk: int
  size: int

  @classmethod
  def of(cls, name: str, length: int, order: Order) -> "ShardLayout":
    """Chooses the largest block size that divides a chunk."""
    chunks = num_chunks(order)
    if length % chunks:
      raise ValueError(
        f"order={order!r} needs shards of {name} tokens whose length {chunks}"
        f" divides, got {length}"
      )
    chunk = length // chunks
    if is_on_accelerator():
      return cls(chunks, 1, chunk)
    sizes = (size for size in range(_BLOCK_SIZE, 0, -1) if chunk % size == 0)
    size = min(next(sizes), chunk)
    # Many short blocks are slower than a single long one.
    size = chunk if size < min(chunk, _BLOCK_SIZE // 8) else size
    return cls(chunks, chunk // max(size, 1) or 1, size)

  def blocks(self, tokens):
    """[..., L, D] to [..., chunks, blocks_per_chunk, size, D]."""
    shape = (self.chunks, self.blocks_per_chunk, self.size, tokens.shape[-1])
    return tokens.reshape(*tokens.shape[:-2], *shape)


@dataclasses.dataclass(frozen=True)
class Ring:
  """The devices of a mesh axis, and the layout of a shard of each."""

  axis_name: str
  size: int
  order: Order
  queries: ShardLayout
  keys: ShardLayout

  @property
  def pairs(self) -> jax.Array:
    """int32 [P, 3]: chunk of keys, chunk and block of queries of each pair."""
    queries = self.queries
    shape = self.keys.chunks, queries.chunks, queries.blocks_per_chunk
    indices = np.indices(shape, dtype=np.int32)
    return jnp.asarray(indices.reshape(3, -1).T)

  def query_number(self, chunk, block):
    """The index in the sequence of one of this device's query blocks."""
    device = jax.lax.axis_index(self.axis_name)
    return self._number(self.queries, device, chunk, block)

  def key_number(self, chunk, block, step):
    """The index of the key block that this device holds after `step` steps."""
    owner = (jax.lax.axis_index(self.axis_name) - step) % self.size
    return self._number(self.keys, owner, chunk, block)

  def _number(self, layout: ShardLayout, device, chunk, block):
    number = chunk_of(device, chunk, self.size, self.order)
    return number * layout.blocks_per_chunk + block

  def varying(self, tree):
    """Makes arrays device-varying, so that their gradients are summed."""
    device = jax.lax.axis_index(self.axis_name)

    def vary(leaf):
      if not may_have_gradient(leaf):
        return leaf
      return jnp.where(device < 0, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(vary, tree)

  def rotated(self, tree):
    """The arrays of the previous device."""
    to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
    return jax.tree.map(
      lambda array: jax.lax.ppermute(array, self.axis_name, to_next), tree
    )


def block_visibility(mask: Mask | None, ring: Ring) -> np.ndarray:
  """EMPTY, PARTIAL or FULL for each pair of blocks of the sequence."""
  layouts = ring.queries, ring.keys
  counts = [
    layout.chunks * layout.blocks_per_chunk * ring.size for layout in layouts
  ]
  if mask is None:
    return np.full(counts, FULL, np.int8)
  rows, columns = (
    Ranges.cut(layout.size * count, max(layout.size, 1))
    for layout, count in zip(layouts, counts)
  )
  return visibility(mask, rows, columns)


def may_have_gradient(leaf: Any) -> bool:
  """Whether `leaf` may have a gradient: a traced array of real numbers."""
  return isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(
    jnp.result_type(leaf), jnp.inexact
  )


def get(array: jax.Array, indices: dict[int, Any]) -> jax.Array:
  """Indexes some axes, for instance {-3: 0}, and removes them."""
  rank = array.ndim
  sizes = [1 if n - rank in indices else array.shape[n] for n in range(rank)]
  block = jax.lax.dynamic_slice(array, _starts(rank, indices), sizes)
  return jax.lax.squeeze(block, tuple(indices))


def put(array: jax.Array, new: jax.Array, indices: dict[int, Any]) -> jax.Array:
  """Replaces the part of an array that `get` returns."""
  new = jnp.expand_dims(new, tuple(indices))
  return jax.lax.dynamic_update_slice(array, new, _starts(array.ndim, indices))


def _starts(rank: int, indices: dict[int, Any]) -> list[Any]:
  return [jnp.int32(indices.get(n - rank, 0)) for n in range(rank)]
