"""Normalizers: functions from a row of scores to a row of weights.

`attend(..., normalizer=...)` takes one of these, or any function of scores
[..., T, S], -inf where hidden, that treats each row alone.
"""

from typing import Any

from attention.normalizers.base import (
  FunctionNormalizer,
  Normalizer,
  OnlineNormalizer,
  checked_fraction,
  checked_weights,
  group_heads,
  is_online,
  masked_fraction,
  masked_weights,
)
from attention.normalizers.exponential import Quotient
from attention.normalizers.exponential import Sigmoid as sigmoid
from attention.normalizers.exponential import SignedSoftmax as signed_softmax
from attention.normalizers.exponential import Softmax as softmax
from attention.normalizers.exponential import Softpick as softpick
from attention.normalizers.row_wise import check_row_wise, follows_leading
from attention.normalizers.sparse import Entmax as entmax
from attention.normalizers.sparse import Sparsemax as sparsemax
from attention.normalizers.stick_breaking import StickBreaking as stick_breaking
from attention.transforms.function_pytree import check_takes

__all__ = [
  "FunctionNormalizer",
  "Normalizer",
  "OnlineNormalizer",
  "Quotient",
  "as_normalizer",
  "check_row_wise",
  "checked_fraction",
  "checked_weights",
  "entmax",
  "follows_leading",
  "group_heads",
  "is_online",
  "is_softmax",
  "masked_fraction",
  "masked_weights",
  "sigmoid",
  "signed_softmax",
  "softmax",
  "softpick",
  "sparsemax",
  "stick_breaking",
]


def as_normalizer(normalizer: Any) -> Normalizer:
  """A normalizer as such; None is softmax, a function is wrapped.

  Raises:
    TypeError: if it is no function.
    ValueError: if it is not a function of scores.
  """
  if normalizer is None:
    return softmax()
  if isinstance(normalizer, Normalizer):
    return normalizer
  if isinstance(normalizer, type) or not callable(normalizer):
    raise TypeError(
      "normalizer must be an instance of attention.normalizers.Normalizer, "
      "such as normalizers.entmax(1.5), or a function of scores, got "
      f"{normalizer!r}"
    )
  check_takes(normalizer, ("scores",), "normalizer")
  return FunctionNormalizer(normalizer)


def is_softmax(normalizer: Any) -> bool:
  """Whether the normalizer is softmax, perhaps with a sink."""
  names = "__call__", "fraction", "terms", "exponents"
  return isinstance(normalizer, softmax) and all(
    getattr(type(normalizer), name) is getattr(softmax, name) for name in names
  )
