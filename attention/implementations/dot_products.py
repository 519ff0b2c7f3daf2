"""Scores that are dot products of mapped tokens."""

import numbers
from typing import Any

from attention.scores import Score
from attention.scores.base import Placed
from attention.scores.classical import (
  Cosine,
  Dot,
  DotProduct,
  General,
  ScaledDot,
)
from attention.scores.wrappers import MappedKeys, QueryKeyNorm

# A class that inherits from one of these may compute other scores.
_PRODUCTS = (Dot, ScaledDot, General, Cosine)
# Wrappers that change tokens only.
_OF_TOKENS = (Placed, MappedKeys, QueryKeyNorm)


def dot_product(score: Score) -> DotProduct | None:
  """The dot product of mapped tokens that a score computes, or None."""
  inner: Any = score
  while type(inner) in _OF_TOKENS:
    inner = inner.score
  return inner if type(inner) in _PRODUCTS else None


def constant_factor(score: Score, query) -> float | None:
  """By which the products of half-precision tokens are multiplied.

  None if that is an array.
  """
  inner = dot_product(score)
  factor = inner.factor(query) if isinstance(inner, ScaledDot) else 1.0
  return float(factor) if isinstance(factor, numbers.Real) else None
