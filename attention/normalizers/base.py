"""Normalizers: functions of scores [..., T, S] that treat each row alone.

Hidden pairs have the score -inf; `attend` sets their weights to zero, and all
weights of a row without a visible pair.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, TypeGuard

import jax
import jax.numpy as jnp

from attention.arrays.equality import EqualByValue
from attention.arrays.head_parameters import grouped
from attention.transforms.function_pytree import FunctionPytree, called


class Normalizer(EqualByValue):
  """A normalizer with parameters: inherit, and define `__call__`.

  Example:
    >>> import dataclasses, jax, jax.numpy as jnp
    >>> from attention import attention_weights
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True, eq=False)
    ... class ReluSquared(Normalizer):
    ...   scale: float
    ...
    ...   def __call__(self, scores):
    ...     return self.scale * jnp.square(jnp.maximum(scores, 0.0))
    >>> tokens = jnp.array([[1.0], [2.0]])
    >>> attention_weights(tokens, tokens, normalizer=ReluSquared(0.5))
    Array([[0.5, 2. ],
           [2. , 8. ]], dtype=float32)
  """

  # Whether a weight depends on its own score only. Results over disjoint sets
  # of keys can then be added, which `ring_attention` needs.
  is_elementwise: ClassVar[bool] = False
  # Whether rows without some of their hidden keys have the same weights. Blocks
  # then read the keys between the first and the last visible one only, and
  # `scores.shape[-1]` is not the number of keys.
  ignores_hidden: ClassVar[bool] = False

  def __call__(self, scores: jax.Array) -> jax.Array:
    """Scores [..., T, S], -inf where hidden, to weights of that shape."""
    raise NotImplementedError(f"{type(self).__name__} must define __call__")

  def fraction(self, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Numerators [..., T, S] and divisors [..., T], not 0, of the weights.

    Blockwise gradients are faster if the sum over a row is in the divisors.
    """
    return checked_weights(self, scores), jnp.ones_like(scores[..., 0])


class OnlineNormalizer(Normalizer):
  """A normalizer that needs one tile of keys at a time: define `terms`.

  Its weights are numerators / (sum of parts + epsilon). Both are functions of
  one score and are proportional to exp(-maximum), where the maximum is that of
  `exponents` over the row.

  Example:
    >>> import dataclasses, jax, jax.numpy as jnp
    >>> from attention.normalizers import OnlineNormalizer
    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass(frozen=True, eq=False)
    ... class PositivePart(OnlineNormalizer):
    ...   def terms(self, scores, maximum):
    ...     parts = jnp.exp(scores - maximum)
    ...     return jnp.where(scores > 0.0, parts, 0.0), parts
    >>> PositivePart()(jnp.log(jnp.array([[3.0, 0.5, 0.5]])))
    Array([[0.75, 0.  , 0.  ]], dtype=float32)
  """

  ignores_hidden: ClassVar[bool] = True
  # The maximum is this at least.
  smallest_maximum: ClassVar[float] = -math.inf
  epsilon = 0.0

  def exponents(self, scores: jax.Array) -> jax.Array:
    """Upper bounds of the logarithms of the parts; -inf for -inf."""
    return scores

  def terms(
    self, scores: jax.Array, maximum: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Numerators and parts [..., t, s] for a maximum [..., t, 1].

    Both are 0 for scores of -inf.
    """
    raise NotImplementedError(f"{type(self).__name__} must define terms")

  def fraction(self, scores):
    maximum = row_maximum(self.exponents(scores))
    maximum = jnp.maximum(maximum, self.smallest_maximum)
    numerators, parts = self.terms(scores, maximum)
    total = jnp.sum(parts, axis=-1) + self.epsilon
    return numerators, jnp.where(total == 0.0, 1.0, total)

  def __call__(self, scores):
    numerators, divisors = self.fraction(scores)
    return numerators / divisors[..., None]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class FunctionNormalizer(FunctionPytree, Normalizer):
  """A plain function of scores as a normalizer."""

  def __call__(self, scores):
    return called(self.function, scores)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupedHeads(Normalizer):
  """Calls a normalizer for heads [H], for scores of heads [K, G]."""

  normalizer: Normalizer
  num_key_value_heads: int = dataclasses.field(metadata={"static": True})
  num_groups: int = dataclasses.field(metadata={"static": True})

  @property
  def ignores_hidden(self) -> bool:  # type: ignore[override]
    return self.normalizer.ignores_hidden

  def __call__(self, scores):
    heads = self.num_key_value_heads * self.num_groups
    leading, rest = scores.shape[:-4], scores.shape[-2:]
    weights = self.normalizer(jnp.reshape(scores, (*leading, heads, *rest)))
    return jnp.reshape(weights, scores.shape)


def group_heads(
  normalizer: Normalizer, num_key_value_heads: int, num_groups: int
) -> Normalizer:
  """The same normalizer for heads laid out as [K, G] instead of [H]."""
  heads = num_key_value_heads, num_groups
  return grouped(normalizer, *heads) or GroupedHeads(normalizer, *heads)


def checked_weights(normalizer: Callable, scores: jax.Array) -> jax.Array:
  """The weights of visible scores, if they have the scores' shape."""
  weights = normalizer(scores)
  shape = getattr(weights, "shape", None)
  if shape != scores.shape:
    returned = type(weights).__name__ if shape is None else shape
    raise ValueError(
      f"normalizer must return an array of the scores' shape {scores.shape}, "
      f"it returned {returned}"
    )
  return weights


def masked_weights(normalizer: Callable, scores: jax.Array) -> jax.Array:
  """The weights; 0 where a score is -inf, with zero derivatives there."""
  scores, visible, _ = _with_constants(scores)
  return jnp.where(visible, checked_weights(normalizer, scores), 0.0)


def _with_constants(
  scores: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Scores for a normalizer, and which scores, and rows, have keys."""
  visible = ~jnp.isneginf(scores)
  has_keys = jnp.any(visible, axis=-1)
  # Derivatives of scores of -inf may not be finite, and a row of -inf alone
  # would be NaN in most normalizers.
  scores = jnp.where(visible, scores, -jnp.inf)
  return jnp.where(has_keys[..., None], scores, 0.0), visible, has_keys


def checked_fraction(
  normalizer: Normalizer, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The fraction of visible scores, if it has the documented shapes."""
  if not _defines_last(normalizer, "fraction", ["__call__"]):
    # A class that overrides `__call__` alone: `fraction` is of other weights.
    return Normalizer.fraction(normalizer, scores)
  parts = normalizer.fraction(scores)
  shapes = tuple(part.shape for part in parts)
  if shapes != (scores.shape, scores.shape[:-1]):
    raise ValueError(
      f"{type(normalizer).__name__}.fraction must return arrays of shapes "
      f"{scores.shape} and {scores.shape[:-1]}, it returned {shapes}"
    )
  return parts


def is_online(normalizer: Normalizer) -> TypeGuard[OnlineNormalizer]:
  """Whether `terms` of an `OnlineNormalizer` without arrays are its weights."""
  return (
    isinstance(normalizer, OnlineNormalizer)
    and not jax.tree.leaves(normalizer)
    and _defines_last(normalizer, "terms", ["__call__", "fraction"])
  )


def _defines_last(normalizer: Normalizer, name: str, others: list[str]) -> bool:
  """Whether no class below the one that defines `name` overrides others."""
  types = type(normalizer).__mro__
  last, *rest = (
    next(each for each in types if name in vars(each))
    for name in (name, *others)
  )
  return all(issubclass(last, each) for each in rest)


def masked_fraction(
  normalizer: Normalizer, scores: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """`checked_fraction`; numerators are 0 where a score is -inf.

  The divisors of rows of -inf alone are 0.
  """
  scores, visible, has_keys = _with_constants(scores)
  numerators, divisors = checked_fraction(normalizer, scores)
  numerators = jnp.where(visible, numerators, 0.0)
  return numerators, jnp.where(has_keys, divisors, 0.0)


def row_maximum(scores: jax.Array) -> jax.Array:
  """The maximum of each row, [..., 1], a constant for derivatives."""
  initial = -jnp.inf if scores.shape[-1] == 0 else None
  maximum = jnp.max(scores, axis=-1, keepdims=True, initial=initial)
  return jax.lax.stop_gradient(maximum)
