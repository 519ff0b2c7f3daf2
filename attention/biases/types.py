"""The biases behind `attention.biases`: pytrees that answer block by block."""

# Overrides keep the docstrings of what they override.
# ruff: noqa: D102

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.positional import (
  GroupedPairs,
  PairsOfHeads,
  Pairwise,
  Shifted,
  checked_length,
  taken,
)


class Bias(Pairwise):
  """What positions add to a score; `attention.biases` has constructors."""

  def __add__(self, other):
    return Sum(self, as_bias(other))

  def __radd__(self, other):
    return as_bias(other) + self

  def shifted(self, offset: int | jax.Array) -> "Bias":
    """The bias for queries whose first one stands at position `offset`."""
    return ShiftedBias(self, offset)

  def grouped(self, num_key_value_heads: int, num_groups: int) -> "Bias":
    """The bias for heads laid out as [K, G] instead of [H]."""
    return GroupedBias(self, num_key_value_heads, num_groups)

  def of_heads(
    self, first: jax.Array, count: int, total: int, axis: int
  ) -> "Bias":
    """The bias of `count` heads from the `first`; all `total` are at `axis`."""
    return BiasOfHeads(self, first, count, total, axis)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Alibi(Bias):
  """-slope[h] * |i - j|."""

  num_heads: int = dataclasses.field(metadata={"static": True})

  @property
  def leading_rank(self):
    return 1

  def block(self, rows, columns, rank):
    distance = jnp.abs(columns[None, :] - rows[:, None])
    slopes = jnp.asarray(_slopes(self.num_heads))[:, None, None]
    return -slopes * distance[None].astype(slopes.dtype)


def _slopes(num_heads: int) -> np.ndarray:
  """The geometric sequence of section 3; [num_heads]."""
  power = 2 ** math.floor(math.log2(num_heads))
  slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
  # The authors' rule for other numbers of heads: every other slope of the
  # sequence for twice as many.
  between = 2.0 ** (-4.0 * np.arange(1, 2 * power, 2) / power)
  return np.concatenate([slopes, between[: num_heads - power]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class RelativePosition(Bias):
  """table[bucket(j - i), h]."""

  table: jax.Array
  bidirectional: bool = dataclasses.field(metadata={"static": True})
  max_distance: int = dataclasses.field(metadata={"static": True})

  @property
  def leading_rank(self):
    return 1

  def block(self, rows, columns, rank):
    buckets = _buckets(
      self.table.shape[0], self.bidirectional, self.max_distance
    )
    # One number a distance, then a single gather for the block.
    by_distance = jnp.take(self.table, buckets, axis=0).T
    far = self.max_distance
    distance = jnp.clip(columns[None, :] - rows[:, None], -far, far)
    return jnp.take(by_distance, distance + far, axis=1)


def _buckets(num_buckets: int, bidirectional: bool, max_distance: int):
  """The bucket of each j - i from -max_distance to max_distance."""
  relative = np.arange(-max_distance, max_distance + 1)
  if bidirectional:
    num_buckets //= 2
    first, distance = num_buckets * (relative > 0), np.abs(relative)
  else:
    first, distance = np.zeros_like(relative), np.maximum(-relative, 0)
  exact = num_buckets // 2
  ratio = np.log(np.maximum(distance, exact) / exact)
  ratio = ratio / math.log(max_distance / exact)
  # A distance on the edge of a bucket must not fall below it by rounding.
  coarse = exact + np.floor(ratio * (num_buckets - exact) + 1e-9).astype(int)
  coarse = np.minimum(coarse, num_buckets - 1)
  return first + np.where(distance < exact, distance, coarse)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ArrayBias(Bias):
  """array[..., i, j]; axes of size 1 broadcast."""

  array: jax.Array

  @property
  def leading_rank(self):
    return max(self.array.ndim - 2, 0)

  def block(self, rows, columns, rank):
    return taken(taken(self.array, columns, -1), rows, -2)

  def check(self, query_length, key_length):
    checked_length("bias", self.array.shape, -2, query_length)
    checked_length("bias", self.array.shape, -1, key_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sum(Bias):
  """left + right."""

  left: Bias
  right: Bias

  @property
  def leading_rank(self):
    return max(self.left.leading_rank, self.right.leading_rank)

  def block(self, rows, columns, rank):
    left, right = axes.aligned(
      self.left.block(rows, columns, rank),
      self.right.block(rows, columns, rank),
    )
    return left + right

  def check(self, query_length, key_length):
    self.left.check(query_length, key_length)
    self.right.check(query_length, key_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ShiftedBias(Shifted, Bias):
  """A shifted bias adds as other biases do."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedBias(GroupedPairs, Bias):
  """So does a bias whose heads are laid out as [K, G]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BiasOfHeads(PairsOfHeads, Bias):
  """And a bias of some heads."""


def as_bias(bias: Any) -> Bias:
  """The `Bias` for what a caller passed as a bias.

  Args:
    bias: a bias, or a floating-point array that broadcasts to the scores.

  Returns:
    A bias.

  Raises:
    TypeError: if `bias` is neither; booleans are a mask.

  Example:
    >>> import jax.numpy as jnp
    >>> as_bias(jnp.array([[0.5, 0.0]])).materialize(2, 2)
    Array([[0.5, 0. ],
           [0.5, 0. ]], dtype=float32)
  """
  if isinstance(bias, Bias):
    return bias
  if isinstance(bias, Pairwise) or not hasattr(bias, "dtype"):
    raise TypeError(
      f"bias must be a bias or an array, got {type(bias).__name__}"
    )
  if not jnp.issubdtype(bias.dtype, jnp.floating):
    raise TypeError(
      f"bias must hold floating-point numbers, got dtype {bias.dtype}; "
      "booleans go into mask"
    )
  return ArrayBias(jnp.asarray(bias))
