"""Digests of arrays: 32 bits that change with any of their numbers.

They are sums of integers, so they are the same in whatever layout an array
lies on its devices.
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
  """Returns a digest of each array.

  A digest is the sum of all bit patterns, each times an odd number of its own,
  modulo 2^32; so a change of any one number changes it, and of more than one
  all but surely.

  Args:
    tree: a pytree of arrays.

  Returns:
    By path; the same in every process.

  Example:
    >>> of_arrays({"w": jnp.arange(3)})
    {'w': 13}
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
  names = (path_name(path) for path, _ in leaves)
  return {name: int(total) for name, total in zip(names, sums)}


def of_json(value: Mapping[str, Any]) -> int:
  """Returns a digest of what is written as JSON.

  Args:
    value: of types that JSON has.

  Returns:
    A number.

  Example:
    >>> of_json({"step": 1}) == of_json({"step": 2})
    False
  """
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
