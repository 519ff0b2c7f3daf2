"""Types of biases, evaluated at blocks of positions; `as_bias`."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from attention.biases.distance_buckets import buckets, of_buckets
from attention.checks import check_floating
from attention.positional.base import (
  ArrayValues,
  Combination,
  Pairwise,
  Transform,
  View,
)


class Bias(Pairwise):
  """Numbers added to the scores, by position; see `attention.biases`."""

  @property
  def may_hide(self) -> bool:
    """Whether a number may be -inf."""
    return True

  def __add__(self, other):
    return Sum(self, as_bias(other))

  def __radd__(self, other):
    # The built-in `sum` starts with 0.
    return self if isinstance(other, int) and other == 0 else self + other

  def __mul__(self, factor):
    if isinstance(factor, int | float | np.integer):
      return Scaled(self, float(factor))
    check_floating(factor=factor)
    return Scaled(self, factor)

  __rmul__ = __mul__

  def __truediv__(self, divisor):
    if not isinstance(divisor, int | float | np.integer):
      check_floating(divisor=divisor)
    return self * (1.0 / divisor)

  def __neg__(self):
    return self * -1.0

  def __sub__(self, other):
    return self + -as_bias(other)

  def __rsub__(self, other):
    return as_bias(other) + -self

  def _view(self, transform: Transform) -> "BiasView":
    return BiasView(self, transform)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Alibi(Bias):
  """-slope[h] * |i - j|."""

  leading_rank = 1
  may_hide = False
  num_heads: int = dataclasses.field(metadata={"static": True})

  def values(self, at):
    slopes = jnp.asarray(_slopes(self.num_heads))
    distance = jnp.abs(at.keys - at.queries).astype(slopes.dtype)
    return at.of_heads(-slopes) * distance


def _slopes(num_heads: int) -> np.ndarray:
  """[num_heads], the geometric sequence of section 3."""
  power = 2 ** math.floor(math.log2(num_heads))
  slopes = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
  # The authors' rule for other numbers of heads: every other slope of the
  # sequence for twice as many.
  between = 2.0 ** (-4.0 * np.arange(1, 2 * power, 2) / power)
  return np.concatenate([slopes, between[: num_heads - power]])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ByDistance(Bias):
  """numbers[h, clip(j - i, -m, m) + m]."""

  leading_rank = 1
  buckets = None
  numbers: jax.Array  # [H, 2m + 1]

  @property
  def max_distance(self) -> int:
    """The largest distance with a number of its own, m."""
    return self.numbers.shape[-1] // 2

  @property
  def by_distance(self) -> Self:
    """The bias itself; see `ByBucket`."""
    return self

  def values(self, at):
    return at.of_distances(self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ByBucket(Bias):
  """numbers[h, bucket of j - i], as T5 has them."""

  leading_rank = 1
  numbers: jax.Array  # [H, number of buckets]
  bidirectional: bool = dataclasses.field(metadata={"static": True})
  max_distance: int = dataclasses.field(metadata={"static": True})

  @property
  def buckets(self) -> np.ndarray:
    """Int [2m + 1]: the bucket of each distance from -m to m."""
    number = self.numbers.shape[-1]
    return buckets(number, self.bidirectional, self.max_distance)

  @property
  def by_distance(self) -> ByDistance:
    """The same bias, with one number for each distance."""
    return ByDistance(of_buckets(self.numbers, self.buckets))

  def values(self, at):
    return at.of_distances(self)


def with_numbers_by_distance(bias: Any) -> Any:
  """The bias, or None, with one number for each distance.

  An implementation calls this once, as a bias with numbers of buckets would
  look them up for every tile.
  """
  return jax.tree.map(
    lambda each: each.by_distance if isinstance(each, ByBucket) else each,
    bias,
    is_leaf=lambda each: isinstance(each, ByBucket),
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class ArrayBias(ArrayValues, Bias):
  """A floating-point array as a bias."""

  name = "bias"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sum(Combination, Bias):
  """left + right."""

  @property
  def may_hide(self):
    return self.left.may_hide or self.right.may_hide

  def values(self, at):
    return self.left.values(at) + self.right.values(at)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Scaled(Bias):
  """factor * inner; the factor is a number or [H]. Hidden keys stay hidden."""

  inner: Any
  factor: float | jax.Array

  @property
  def leading_rank(self):
    return max(self.inner.leading_rank, jnp.ndim(self.factor))

  @property
  def may_hide(self):
    return self.inner.may_hide

  def values(self, at):
    values, factor = self.inner.values(at), at.of_heads(self.factor)
    if not isinstance(factor, float):
      factor = factor.astype(values.dtype)
    if not self.may_hide:
      return values * factor
    hidden = values == -jnp.inf
    finite = jnp.where(hidden, 0.0, values)
    return jnp.where(hidden, -jnp.inf, finite * factor)

  def check(self, query_length, key_length):
    self.inner.check(query_length, key_length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class BiasView(View, Bias):
  """A bias, changed by a `Transform`."""

  @property
  def may_hide(self):
    return self.inner.may_hide


def as_bias(bias: Any) -> Bias:
  """Converts an array to a `Bias`; leaves a `Bias` as it is.

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
    hint = (
      "; call it if it makes a bias, as in biases.alibi(8), or pass "
      "score=scores.modified(score, function) for a function of scores and "
      "positions"
    )
    raise TypeError(
      f"bias must be a bias or an array, got {type(bias).__name__}"
      f"{hint if callable(bias) else ''}"
    )
  if not jnp.issubdtype(bias.dtype, jnp.floating):
    raise TypeError(
      f"bias must hold floating-point numbers, got dtype {bias.dtype}; "
      "booleans go into mask"
    )
  return ArrayBias(jnp.asarray(bias))
