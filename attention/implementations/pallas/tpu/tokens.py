"""Tokens in the kernels for TPUs.

XLA stores tokens of 64 features as [64, T], which fills whole registers, and
kernels read and write them so. In between they are [t, D].
"""

from typing import Any

import jax
import jax.numpy as jnp

LANES = 128  # of a register


def indices(size: int, axis: int) -> jax.Array:
  """0, 1, ... along one axis of a matrix, int32 [size, 1] or [1, size]."""
  shape = [1, 1]
  shape[axis] = size
  return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def is_transposed(features: int) -> bool:
  """Whether tokens [..., T, features] are stored as [..., features, T]."""
  return features % LANES != 0


def stored(tokens: jax.Array) -> jax.Array:
  """Tokens [..., T, D] as kernels read them."""
  return tokens.mT if is_transposed(tokens.shape[-1]) else tokens


def read(ref: Any) -> jax.Array:
  """A tile of tokens [t, D]."""
  return _transposed(ref[...]) if _holds_transposed(ref) else ref[...]


def write(ref: Any, tokens: jax.Array) -> None:
  """Writes a tile of tokens [t, D]."""
  tokens = _transposed(tokens) if _holds_transposed(ref) else tokens
  ref[...] = tokens.astype(ref.dtype)


def _holds_transposed(ref: Any) -> bool:
  # A tile has a multiple of 128 tokens.
  return ref.shape[0] % LANES != 0


def _transposed(tile: jax.Array) -> jax.Array:
  """The transpose, in 32 bits at least: not all TPUs transpose 16."""
  wide = tile.astype(jnp.promote_types(tile.dtype, jnp.float32))
  return wide.T.astype(tile.dtype)
