"""Refuses functions of the user that do not treat each row of scores alone."""

import functools
from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from attention.normalizers.base import (
  FunctionNormalizer,
  GroupedHeads,
  Normalizer,
  checked_fraction,
)
from attention.transforms.dependence import (
  combined_entries,
  combines_entries,
  longest_axis,
  multiple_above,
  traced_longer,
)
from attention.transforms.function_pytree import is_of_this_package

_RULE = (
  "normalizer must be a function of scores [..., T, S] that treats each row "
  "[S] alone, because attend calls it on blocks of queries, but it {}. A class "
  "attention.normalizers.Normalizer is not checked."
)


def check_row_wise(
  normalizer: Normalizer, shape: Sequence[int], dtype: DTypeLike
) -> None:
  """Raises ValueError if a plain function depends on other rows.

  Args:
    normalizer: the normalizer.
    shape: [..., T, S], the shape of the scores.
    dtype: of the scores.
  """
  if not isinstance(_ungrouped(normalizer), FunctionNormalizer) or 0 in shape:
    return
  if not all(isinstance(size, int) for size in shape):
    return  # sizes are symbols of `jax.export`

  def trace(length):
    scores = jax.ShapeDtypeStruct((*leading, length, key_length), dtype)
    return jax.make_jaxpr(normalizer)(scores)

  *leading, length, key_length = shape
  longest = longest_axis(trace(length))
  sizes = {"queries": multiple_above(length, longest)}
  longer = traced_longer(trace, sizes, _RULE)
  if found := combined_entries(longer, longest):
    raise ValueError(_RULE.format(f"{found} the queries"))


def follows_leading(
  normalizer: Normalizer, shape: Sequence[int], dtype: DTypeLike, axes: set[int]
) -> bool:
  """Whether the entries of some leading axes have weights of their own.

  Args:
    normalizer: the normalizer.
    shape: [..., T, S], the shape of the scores.
    dtype: of the scores.
    axes: the axes.
  """
  inner = _ungrouped(normalizer)
  is_function = isinstance(inner, FunctionNormalizer)
  if not axes or (is_of_this_package(type(inner)) and not is_function):
    return True

  def trace(shape):
    fraction = functools.partial(checked_fraction, normalizer)
    return jax.make_jaxpr(fraction)(jax.ShapeDtypeStruct(shape, dtype))

  closed = trace(shape)
  longest = longest_axis(closed)
  sizes = [
    multiple_above(size, longest) if axis in axes else size
    for axis, size in enumerate(shape)
  ]
  return not combines_entries(closed, lambda: trace(sizes), longest)


def _ungrouped(normalizer: Normalizer) -> Normalizer:
  """The normalizer of heads [H]."""
  while isinstance(normalizer, GroupedHeads):
    normalizer = normalizer.normalizer
  return normalizer
