"""Parameters of which each head has its own, of scores and of normalizers."""

import dataclasses
import types
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.arrays import axes

# The metadata of a dataclass's field: the rank of one head's parameter, which
# has leading axes, as in [H], [H, A] and [H, D, A].
SCALAR = types.MappingProxyType({"core": 0})
VECTOR = types.MappingProxyType({"core": 1})
MATRIX = types.MappingProxyType({"core": 2})
# A number for each position, which `Positions.at_queries` and `at_keys` read.
BY_POSITION = types.MappingProxyType({"core": 1, "by_position": True})


class Declared(NamedTuple):
  """What is declared of a leaf."""

  head_axis: int | None  # None without an axis of heads
  by_position: bool


def head_axes(owner: Any) -> list[int | None]:
  """The axis of heads of each leaf, None without one or if undeclared."""
  leaves = declared(owner)
  if leaves is None:
    return [None] * len(jax.tree.leaves(owner))
  return [each.head_axis for each in leaves]


def declared(owner: Any) -> list[Declared] | None:
  """What is declared of each leaf; None if something is undeclared."""
  if not dataclasses.is_dataclass(owner):
    return None
  leaves: list[Declared] = []
  for field in dataclasses.fields(owner):
    value = getattr(owner, field.name)
    if value is None or field.metadata.get("static"):
      continue
    if "core" in field.metadata:
      axis = jnp.ndim(value) - field.metadata["core"] - 1
      by_position = field.metadata.get("by_position", False)
      leaves.append(Declared(axis if axis >= 0 else None, by_position))
      continue
    inner = declared(value) if jax.tree.leaves(value) else []
    if inner is None:
      return None
    leaves += inner
  return leaves if len(leaves) == len(jax.tree.leaves(owner)) else None


def check_parameters(
  owner: Any, leading: Sequence[int], *, may_grow: bool
) -> None:
  """Raises unless the parameters are arrays that fit the scores' leading axes.

  Args:
    owner: a score or a normalizer; fields without a declared rank are skipped.
    leading: the sizes of the axes [...] of scores [..., T, S].
    may_grow: whether the parameters may add to these axes.
  """
  if not dataclasses.is_dataclass(owner):
    return
  for field in dataclasses.fields(owner):
    value = getattr(owner, field.name)
    if "core" not in field.metadata:
      check_parameters(value, leading, may_grow=may_grow)
      continue
    if isinstance(value, list | tuple | str) or (
      value is None and not _may_be_absent(field)
    ):
      raise TypeError(
        f"{field.name} of {type(owner).__name__} must be an array or a number, "
        f"got {value!r}"
      )
    shape = getattr(value, "shape", ())
    own = shape[: len(shape) - field.metadata["core"]]
    try:
      fits = jnp.broadcast_shapes(own, leading)
    except ValueError:
      fits = None
    if fits is None or (fits != tuple(leading) and not may_grow):
      raise AssertionError(
        f"{field.name} has leading axes {own}, which do not broadcast to "
        f"{tuple(leading)}, those of the scores"
      )


def _may_be_absent(field: dataclasses.Field) -> bool:
  """Whether the default or the type of a field allows None."""
  if field.default is None or isinstance(field.type, str) or field.type is Any:
    return True
  return type(None) in typing.get_args(field.type)


def grouped(owner: Any, num_key_value_heads: int, num_groups: int) -> Any:
  """The owner for heads [K, G] instead of [H]; None if ranks are undeclared."""
  if declared(owner) is None:
    return None
  heads = num_key_value_heads, num_groups
  leaves, structure = jax.tree.flatten(owner)
  return jax.tree.unflatten(
    structure,
    [_grouped(*each, *heads) for each in zip(leaves, head_axes(owner))],
  )


def _grouped(
  array, axis: int | None, num_key_value_heads: int, num_groups: int
):
  if axis is None:
    return array
  size = jnp.shape(array)[axis]
  if size in (1, num_key_value_heads * num_groups):
    return axes.split_axis(array, axis, num_key_value_heads, num_groups)
  if size == num_key_value_heads:
    return axes.split_axis(array, axis, num_key_value_heads, 1)
  raise ValueError(
    f"a parameter of shape {jnp.shape(array)} has {size} heads, expected "
    f"1, {num_key_value_heads} or {num_key_value_heads * num_groups}"
  )
