"""Positions of queries and keys, and arrays with an entry for each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.checks import check_examples

# Sums of positions must fit into 32 bits.
_LARGEST_OFFSET = 2**30


def positions(length: int) -> np.ndarray | jax.Array:
  """The positions 0 ... length - 1; constants if the length is an integer."""
  known = isinstance(length, int)
  return (np if known else jnp).arange(length, dtype=np.int32)


def positions_array(name: str, given: Any) -> jax.Array:
  """Positions [..., n], int32."""
  array = jnp.asarray(given)
  if not array.ndim or not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(
      f"{name} must be positions [..., n], integers, got {array.dtype} of"
      f" shape {array.shape}"
    )
  return array.astype(jnp.int32)  # distances are signed


def checked_offset(offset: int | jax.Array) -> int | jax.Array:
  """One integer, limited so that sums of positions fit into 32 bits."""
  if isinstance(offset, list | tuple):
    offset = np.asarray(offset)
  dtype, shape = jnp.result_type(offset), jnp.shape(offset)
  if shape or not jnp.issubdtype(dtype, jnp.integer):
    raise ValueError(
      f"offset must be one integer, got {dtype} of shape {shape};"
      " masks.causal(offset) takes one offset per example"
    )
  if isinstance(offset, int):
    return max(-_LARGEST_OFFSET, min(offset, _LARGEST_OFFSET))
  return offset


def checked_offsets(name: str, offsets: Any, tokens: jax.Array) -> Any:
  """One integer, or integers [B...] for all examples of tokens [B..., T, D]."""
  if isinstance(offsets, list | tuple):
    offsets = np.asarray(offsets)
  dtype = jnp.result_type(offsets)
  if not jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(f"{name} must be an integer, or an array, got {offsets}")
  check_examples(name, offsets, tokens)
  if not jnp.ndim(offsets):
    return offsets
  return jnp.broadcast_to(offsets, tokens.shape[:-2])


@dataclasses.dataclass(frozen=True, eq=False)
class TilePositions:
  """`size` positions from `start`, a multiple of `size`; acts as an array."""

  start: int | jax.Array
  size: int

  def __getitem__(self, index):
    return self.array[index]

  def __add__(self, offset):
    return self.array + offset

  @property
  def array(self) -> jax.Array:
    """int32 [size]."""
    return self.start + jnp.arange(self.size, dtype=jnp.int32)


def taken(array: jax.Array, index: Any, axis: int) -> jax.Array:
  """`array` at `index` along `axis`, unless the axis is absent or of size 1."""
  if array.ndim < -axis or array.shape[axis] == 1:
    return array
  if isinstance(index, TilePositions):
    if not index.size or array.shape[axis] % index.size == 0:
      return jax.lax.dynamic_slice_in_dim(
        array, index.start, index.size, axis=axis
      )
    index = index.array
  if isinstance(index, np.ndarray):
    # Consecutive constants need no gather, whose gradient is slow.
    start, stop = (index[0], index[-1] + 1) if index.size else (0, 0)
    if start >= 0 and stop <= array.shape[axis] and (np.diff(index) == 1).all():
      return jax.lax.slice_in_dim(array, int(start), int(stop), axis=axis)
  # The last tile may be incomplete: indices past the end read the last entry.
  return jnp.take(array, index, axis=axis, mode="clip")


def checked_length(name: str, shape, axis: int, length: int | None) -> None:
  """Raises ValueError unless an axis is absent, 1 or `length` (None: any)."""
  if len(shape) < -axis or length is None or shape[axis] in (1, length):
    return
  raise ValueError(
    f"{name} of shape {tuple(shape)} does not broadcast: its axis {axis} must "
    f"be 1 or {length}"
  )
