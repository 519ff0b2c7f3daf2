"""Axes of arrays, with explicit ranks: no array is promoted silently."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def round_up(length: Any, multiple: Any) -> Any:
  """The least multiple of a number that is at least `length`."""
  return -(-length // multiple) * multiple


def with_rank(array: jax.Array, rank: int) -> jax.Array:
  """Adds axes of size 1 in front until `array` has `rank` axes."""
  missing = rank - array.ndim
  if missing <= 0:
    return array
  return jnp.reshape(array, (1,) * missing + array.shape)


def aligned(*arrays: jax.Array) -> list[jax.Array]:
  """Gives all arrays the rank of the largest, for broadcasting."""
  rank = max(array.ndim for array in arrays)
  return [with_rank(array, rank) for array in arrays]


def with_scalar(array: jax.Array, scalar: Any) -> list[jax.Array]:
  """An array [..., n, m] and a number or [...], of one dtype and one rank."""
  return aligned(array, jnp.asarray(scalar, array.dtype)[..., None, None])


def leading_aligned(parameter: jax.Array, rank: int, core: int) -> jax.Array:
  """Adds axes before the last `core`: [B] is [B, 1] for [B, H, T, S]."""
  own = parameter.ndim - core
  if own > rank:
    raise ValueError(
      f"a mask or bias parameter of shape {parameter.shape} has {own} leading "
      f"axes, but the scores have {rank}"
    )
  leading, rest = parameter.shape[:own], parameter.shape[own:]
  return jnp.reshape(parameter, leading + (1,) * (rank - own) + rest)


def split_axis(array: jax.Array, axis: int, outer: int, inner: int):
  """Splits one axis into (outer, inner); an axis of size 1 into (1, 1)."""
  axis = axis % array.ndim
  sizes = (1, 1) if array.shape[axis] == 1 else (outer, inner)
  return jnp.reshape(
    array, array.shape[:axis] + sizes + array.shape[axis + 1 :]
  )


def join_axes(array: jax.Array, axis: int, outer: int, inner: int):
  """Joins the axes before and at `axis`; those of size 1 are repeated."""
  axis = axis % array.ndim
  before, after = array.shape[: axis - 1], array.shape[axis + 1 :]
  array = jnp.broadcast_to(array, (*before, outer, inner, *after))
  return jnp.reshape(array, (*before, outer * inner, *after))


def indices(shape: Sequence[int]) -> tuple[jax.Array, ...]:
  """`jnp.indices`, for sizes that may be symbols of `jax.export` too."""
  return tuple(
    jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    for axis in range(len(shape))
  )


def varying_zero(arguments: Any, dtype: Any) -> jax.Array:
  """A zero that varies over the mesh axes that the arguments vary over."""
  # Under `jax.shard_map` the initial state of a loop must have this type.
  return _varying(jnp.zeros((), dtype), _varying_axes(arguments))


def varying_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """The arrays, all varying over the mesh axes that one of them varies over."""
  return varying_like(arrays, arrays)


def varying_like(
  others: Sequence[jax.Array], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
  """The arrays, varying over the mesh axes over which one of others varies."""
  every = _varying_axes(others)
  return [_varying(array, every - _varying_axes(array)) for array in arrays]


def are_varying(arrays: Any) -> bool:
  """Whether the type of one of the arrays says that it varies over a mesh."""
  leaves = jax.tree.leaves(arrays)
  return bool(_varying_axes([x for x in leaves if isinstance(x, jax.Array)]))


def shape_like(array: jax.Array, shape: Sequence[int], dtype) -> Any:
  """The type of an array that varies over the same mesh axes as another."""
  return jax.ShapeDtypeStruct(
    shape, dtype, manual_axis_type=jax.typeof(array).manual_axis_type
  )


def _varying_axes(arrays: Any) -> set[str]:
  """The axes of `jax.shard_map` over which one of the arrays varies."""
  varying: set[str] = set()
  for array in jax.tree.leaves(arrays):
    varying |= jax.typeof(array).manual_axis_type.varying
  return varying


def _varying(array, mesh_axes: set[str]) -> jax.Array:
  return jax.lax.pcast(array, tuple(sorted(mesh_axes)), to="varying")
