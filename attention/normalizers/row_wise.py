"""Refuses functions of the user that do not treat each row of scores alone."""

from collections.abc import Sequence

import jax
from jax.typing import DTypeLike

from attention.normalizers.base import (
  FunctionNormalizer,
  GroupedHeads,
  Normalizer,
)
from attention.transforms.dependence import (
  combined_entries,
  longest_axis,
  multiple_above,
  traced_longer,
)

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
  inner = normalizer
  while isinstance(inner, GroupedHeads):
    inner = inner.normalizer
  if not isinstance(inner, FunctionNormalizer) or 0 in shape:
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
