"""The content of a checkpoint: a state's arrays, and digests of them."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.distributed.sharding import path_name
from experiments.optimization.step import TrainState

ITEMS = ("state", "batches", "digests")


def arrays(state: TrainState) -> dict[str, Any]:
  """Returns a state as a dictionary of arrays, with the rng as plain data."""
  plain = {
    "step": state.step,
    "params": state.params,
    "opt_state": state.opt_state,
    "rng": _key_data(state.rng),
  }
  return plain | ({} if state.average is None else {"average": state.average})


def _key_data(rng):
  if not isinstance(rng, jax.ShapeDtypeStruct):
    return jax.random.key_data(rng)
  plain = jax.eval_shape(jax.random.key_data, rng)
  return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=rng.sharding)


def digests(
  plain: Mapping[str, Any], batches: Mapping[str, Any]
) -> dict[str, int]:
  """Returns the digests of arrays, and of the data iterator's position."""
  position = json.dumps(batches, sort_keys=True).encode()
  return {**array_digests(plain), "batches": zlib.crc32(position)}


def array_digests(tree: Any) -> dict[str, int]:
  """Returns a 32-bit digest of each array, by path."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
  names = (path_name(path) for path, _ in leaves)
  return {name: int(total) for name, total in zip(names, sums)}


@jax.jit
def _sums(leaves):
  return [_sum(leaf) for leaf in leaves]


@jax.jit  # traced once a shape
def _sum(array) -> jax.Array:
  width = array.dtype.itemsize * 8
  bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}"))
  bits = bits.astype(jnp.uint32)
  index = jnp.zeros(bits.shape, jnp.uint32)
  for axis, size in enumerate(bits.shape):
    index = index * np.uint32(size)
    index += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
