"""The types of masks: pytrees that are evaluated block by block."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attention.positional.base import (
  ArrayValues,
  Combination,
  GroupHeads,
  Pairwise,
  SelectHeads,
  Shift,
  Transform,
  View,
)
from attention.positional.pair_block import PairBlock
from attention.positional.position_arrays import checked_length
from attention.transforms.function_pytree import FunctionPytree


class Mask(Pairwise):
  """Which queries may attend to which keys; see `attention.masks`.

  Blockwise attention computes all tiles of a user's subclass, but skips the
  tiles that `attention.masks.where` hides.
  """

  def __and__(self, other):
    return Combined(self, as_mask(other), "and")

  def __or__(self, other):
    return Combined(self, as_mask(other), "or")

  __rand__ = __and__
  __ror__ = __or__

  def __invert__(self):
    return self._view(Invert())

  def may_show(self, rows: Any, columns: Any) -> jax.Array | bool:
    """Whether a tile may have a visible pair; True if that is unknown.

    Blockwise attention calls it for masks whose arrays are traced, and skips
    the other tiles at run time.
    """
    del rows, columns
    return True

  def _view(self, transform: Transform) -> "MaskView":
    return MaskView(self, transform)


def _register_static_integers(cls):
  """Registers a pytree in which Python integers and None are static."""
  names = [field.name for field in dataclasses.fields(cls)]

  def flatten(mask):
    values = {name: getattr(mask, name) for name in names}
    known = tuple(
      (name, value)
      for name, value in values.items()
      if value is None or isinstance(value, int)
    )
    traced = tuple(name for name in names if name not in dict(known))
    return [values[name] for name in traced], (traced, known)

  def unflatten(structure, leaves):
    traced, known = structure
    return cls(**dict(known), **dict(zip(traced, leaves)))

  jax.tree_util.register_pytree_node(cls, flatten, unflatten)
  return cls


@_register_static_integers
@dataclasses.dataclass(frozen=True, eq=False)
class Band(Mask):
  """i - left <= j <= i + right; None leaves a side open."""

  left: Any
  right: Any

  @property
  def leading_rank(self):
    sides = (self.left, self.right)
    return max(jnp.ndim(side) for side in (0, *sides) if side is not None)

  def values(self, at):
    distance = at.keys - at.queries
    visible = jnp.ones(distance.shape, bool)
    if self.left is not None:
      visible = visible & (distance >= -at.leftmost(self.left))
    if self.right is not None:
      visible = visible & (distance <= at.leftmost(self.right))
    return visible


@_register_static_integers
@dataclasses.dataclass(frozen=True, eq=False)
class Below(Mask):
  """j < limit."""

  limit: Any

  @property
  def leading_rank(self):
    return jnp.ndim(self.limit)

  def values(self, at):
    return at.keys < at.leftmost(self.limit)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Segments(Mask):
  """query_ids[i] == key_ids[j]."""

  query_ids: jax.Array
  key_ids: jax.Array

  @property
  def leading_rank(self):
    return max(self.query_ids.ndim, self.key_ids.ndim) - 1

  def values(self, at):
    query_ids, key_ids = at.of_tokens(self)
    return query_ids == key_ids

  def may_show(self, rows, columns):
    ids = self.query_ids, self.key_ids
    if not any(isinstance(each, jax.core.Tracer) for each in ids):
      return True  # these tiles are skipped when tracing
    query, key = PairBlock(rows, columns, self.leading_rank).of_tokens(self)
    below = query.min(axis=(-2, -1)) <= key.max(axis=(-2, -1))
    return jnp.any(below & (query.max(axis=(-2, -1)) >= key.min(axis=(-2, -1))))

  def check(self, query_length, key_length):
    checked_length("query_ids", self.query_ids.shape, -1, query_length)
    checked_length("key_ids", self.key_ids.shape, -1, key_length)


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Where(FunctionPytree, Mask):
  """function(query positions, key positions)."""

  def values(self, at):
    return at.of_function(self.function)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ArrayMask(ArrayValues, Mask):
  """A boolean array as a mask."""

  name = "mask"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Combined(Combination, Mask):
  """left & right, or left | right."""

  operation: str = dataclasses.field(metadata={"static": True})

  def values(self, at):
    left, right = self.left.values(at), self.right.values(at)
    return left & right if self.operation == "and" else left | right

  def may_show(self, rows, columns):
    pair = self.left, self.right
    left, right = (each.may_show(rows, columns) for each in pair)
    if self.operation == "or":
      return True if left is True or right is True else left | right
    if left is True or right is True:
      return right if left is True else left
    return left & right


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Invert(Transform):
  """Swaps visible and hidden pairs."""

  def values(self, inner, at):
    return ~inner.values(at)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MaskView(View, Mask):
  """A mask, changed by a `Transform`."""

  def may_show(self, rows, columns):
    change = self.transform
    if isinstance(change, Shift):
      return self.inner.may_show(*change.moved(rows, columns))
    if isinstance(change, GroupHeads | SelectHeads):
      return self.inner.may_show(rows, columns)
    return True


def as_mask(mask: Any) -> Mask:
  """Converts a boolean array to a `Mask`; leaves a `Mask` as it is.

  Args:
    mask: a mask, or a boolean array that broadcasts to the scores.

  Returns:
    A mask.

  Raises:
    TypeError: if `mask` is neither; numbers that are added are a bias.

  Example:
    >>> import jax.numpy as jnp
    >>> as_mask(jnp.array([[True, False]])).materialize(2, 2)
    Array([[ True, False],
           [ True, False]], dtype=bool)
  """
  if isinstance(mask, Mask):
    return mask
  if isinstance(mask, Pairwise) or not hasattr(mask, "dtype"):
    hint = (
      "; call it if it makes a mask, as in masks.causal(), or pass "
      "masks.where(function) for a function of positions"
    )
    raise TypeError(
      f"mask must be a mask or a boolean array, got {type(mask).__name__}"
      f"{hint if callable(mask) else ''}"
    )
  if mask.dtype != jnp.bool_:
    raise TypeError(
      f"mask must be boolean (True means attend), got dtype {mask.dtype}; "
      "numbers to add to the scores go into bias"
    )
  return ArrayMask(jnp.asarray(mask))
