"""How a ring of devices shares a sequence: what each has, and what meets when.

Axes: n devices, c chunks of the sequence a device, t queries and s keys of a
piece, into which chunks are cut again so that only a little travels at a time.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.masks.tile_visibility import Ranges, visibility
from attention.masks.types import Mask
from attention.positional import FULL
from attention.ring.order import Order, chunk_of, num_chunks

# Tokens of a piece at most: its scores must not outgrow a share of tokens.
_PIECE = 256


@dataclasses.dataclass(frozen=True)
class Cut:
  """A device's share of tokens: c chunks of `each` pieces of `size` tokens."""

  chunks: int
  each: int
  size: int

  @classmethod
  def of(cls, name: str, length: int, order: Order) -> "Cut":
    """The longest pieces that divide a chunk and are not too long."""
    chunks = num_chunks(order)
    if length % chunks:
      raise ValueError(
        f"order={order!r} needs a share of {name} tokens that {chunks} divides,"
        f" got {length}"
      )
    chunk = length // chunks
    sizes = (size for size in range(_PIECE, 0, -1) if chunk % size == 0)
    size = min(next(sizes), chunk)
    # Many short ones are worse than a single long one.
    size = chunk if size < min(chunk, _PIECE // 8) else size
    return cls(chunks, chunk // max(size, 1) or 1, size)

  def pieces(self, tokens):
    """[..., c, each, size, D], of [..., L, D]."""
    shape = (self.chunks, self.each, self.size, tokens.shape[-1])
    return tokens.reshape(*tokens.shape[:-2], *shape)


@dataclasses.dataclass(frozen=True)
class Ring:
  """The devices of an axis, and how each one's queries and keys are cut."""

  axis_name: str
  size: int
  order: Order
  own: Cut
  met: Cut

  @property
  def steps(self) -> jax.Array:
    """[n]: after so many steps a share comes from that far back."""
    return jnp.arange(self.size, dtype=jnp.int32)

  @property
  def places(self) -> jax.Array:
    """[., 2]: chunk and piece of each of this device's queries."""
    every = np.indices((self.own.chunks, self.own.each), dtype=np.int32)
    return jnp.asarray(every.reshape(2, -1).T)

  def own_number(self, chunk, piece):
    """Where one of this device's pieces stands in the whole sequence."""
    device = jax.lax.axis_index(self.axis_name)
    return (
      chunk_of(device, chunk, self.size, self.order) * self.own.each + piece
    )

  def met_number(self, chunk, piece, step):
    """Where a piece of keys does that has travelled for so many steps."""
    owner = (jax.lax.axis_index(self.axis_name) - step) % self.size
    return chunk_of(owner, chunk, self.size, self.order) * self.met.each + piece

  def varying(self, tree):
    """Told to differ between devices, so that their gradients are summed."""
    device = jax.lax.axis_index(self.axis_name)

    def vary(leaf):
      if not may_have_gradient(leaf):
        return leaf
      return jnp.where(device < 0, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(vary, tree)

  def passed_on(self, tree):
    """What the device before this one has."""
    to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
    return jax.tree.map(
      lambda array: jax.lax.ppermute(array, self.axis_name, to_next), tree
    )


def seen(mask: Mask | None, ring: Ring) -> np.ndarray:
  """EMPTY, PARTIAL or FULL for each pair of pieces of the whole sequence."""
  cuts = ring.own, ring.met
  counts = [cut.chunks * cut.each * ring.size for cut in cuts]
  if mask is None:
    return np.full(counts, FULL, np.int8)
  return visibility(
    mask,
    *(
      Ranges.cut(cut.size * count, max(cut.size, 1))
      for cut, count in zip(cuts, counts)
    ),
  )


def may_have_gradient(leaf: Any) -> bool:
  """Whether derivatives by an array may be asked for; known ones have none."""
  return isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(
    jnp.result_type(leaf), jnp.inexact
  )


def get(array: jax.Array, places: dict[int, Any]) -> jax.Array:
  """What stands at places of some axes, {-3: 0}; these axes are gone."""
  rank = array.ndim
  sizes = [1 if n - rank in places else array.shape[n] for n in range(rank)]
  block = jax.lax.dynamic_slice(array, _starts(rank, places), sizes)
  return jax.lax.squeeze(block, tuple(places))


def put(array: jax.Array, new: jax.Array, places: dict[int, Any]) -> jax.Array:
  """The array with something new there."""
  new = jnp.expand_dims(new, tuple(places))
  return jax.lax.dynamic_update_slice(array, new, _starts(array.ndim, places))


def _starts(rank: int, places: dict[int, Any]) -> list[Any]:
  return [jnp.int32(places.get(n - rank, 0)) for n in range(rank)]
