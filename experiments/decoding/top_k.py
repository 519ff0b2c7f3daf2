"""A faster top-k for rows of a vocabulary's size."""

import jax
import jax.numpy as jnp

# 32 and 64 are the fastest of 16 to 256 on CPUs, with 2000 to 32000 in a row.
_BLOCK_SIZES = range(32, 129)


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns the values and indices of `jax.lax.top_k` for rows [..., V]."""
  *leading, size = values.shape
  block_size = _block_size(size)
  num_blocks = -(-size // block_size)
  if num_blocks < 4 * count:
    return jax.lax.top_k(values, count)
  padding = [(0, 0)] * len(leading)
  padding.append((0, num_blocks * block_size - size))
  blocks = jnp.pad(values, padding, constant_values=-jnp.inf)
  blocks = blocks.reshape(*leading, num_blocks, block_size)
  # The blocks with the largest maxima contain the largest values.
  _, best_blocks = jax.lax.top_k(blocks.max(-1), count)
  # In the order of the row, so that the first of equal values is taken.
  best_blocks = jnp.sort(best_blocks)
  kept = jnp.take_along_axis(blocks, best_blocks[..., None], axis=-2)
  top, index = jax.lax.top_k(kept.reshape(*leading, -1), count)
  block = jnp.take_along_axis(best_blocks, index // block_size, axis=-1)
  return top, block * block_size + index % block_size


def _block_size(size: int) -> int:
  """Returns a block size that divides a row if possible: padding copies it."""
  fitting = [each for each in _BLOCK_SIZES if size % each == 0]
  return min(fitting or [64], key=lambda each: abs(each - 64))
