"""Digests of arrays: 32 bits that change with any element.

They are sums of integers, so they do not depend on the sharding.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.distributed.sharding import path_name


def of_arrays(tree: Any) -> dict[str, int]:
  """Returns the digest of each array, by path.

  A digest is the sum of all bit patterns, each times an odd number of its own,
  modulo 2^32. A change of one element always changes it, a change of several
  almost certainly.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
  names = (path_name(path) for path, _ in leaves)
  return {name: int(total) for name, total in zip(names, sums)}


def of_json(value: Mapping[str, Any]) -> int:
  """Returns a digest of a value that JSON can represent."""
  return zlib.crc32(json.dumps(value, sort_keys=True).encode())


@jax.jit
def _sums(leaves):
  return [_sum(leaf) for leaf in leaves]


@jax.jit  # traced once a shape
def _sum(array) -> jax.Array:
  width = array.dtype.itemsize * 8
  bits = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{width}"))
  bits = bits.astype(jnp.uint32)
  place = jnp.zeros(bits.shape, jnp.uint32)
  for axis, size in enumerate(bits.shape):
    place = place * np.uint32(size)
    place += jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  return jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32)
