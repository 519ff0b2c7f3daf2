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
_MAX_FOR_NUMPY = 1 << 24  # elements, which take NumPy a tenth of a second


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
  found = [leaf for _, leaf in leaves]
  if _is_small_and_on_cpus(found):
    sums = [_numpy_sum(np.asarray(array)) for array in found]
  else:
    sums = jax.device_get(_sums(found))
  names = (path_name(path) for path, _ in leaves)
  return {name: int(total) for name, total in zip(names, sums)}


def _is_small_and_on_cpus(leaves: list[Any]) -> bool:
  """Whether NumPy computes the digests in less time than `_sums` compiles."""
  return sum(leaf.size for leaf in leaves) <= _MAX_FOR_NUMPY and all(
    isinstance(leaf, np.ndarray)
    or (
      leaf.is_fully_addressable
      and all(device.platform == "cpu" for device in leaf.devices())
    )
    for leaf in leaves
  )


def _numpy_sum(array: np.ndarray) -> int:
  """The same sum as `_sum`."""
  bits = array.view(f"uint{array.dtype.itemsize * 8}").astype(np.uint32)
  index = np.arange(array.size, dtype=np.uint32)
  return int((bits.ravel() * (2 * index + 1)).sum(dtype=np.uint32))


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
