"""Scores that are dot products of mapped tokens."""

import numbers
from typing import Any

from attention.scores import Score
from attention.scores.base import Placed
from attention.scores.classical import DotProduct, ScaledDot
from attention.scores.wrappers import MappedKeys, QueryKeyNorm

_PAIRS = (DotProduct.pair, ScaledDot.pair)
# Wrappers that change tokens only.
_OF_TOKENS = (Placed, MappedKeys, QueryKeyNorm)


def is_dot_product(score: Score) -> bool:
  """Whether a score is a product of mapped tokens, times a factor."""
  # A class of the user may override `pair`.
  return type(score).pair in _PAIRS and not score.reads_positions


def dot_product(score: Score) -> DotProduct | None:
  """The dot product of mapped tokens that a score computes, or None."""
  inner: Any = score
  while type(inner) in _OF_TOKENS:
    inner = inner.score
  return inner if is_dot_product(inner) else None


def constant_factor(score: Score, query) -> float | None:
  """By which the products of half-precision tokens are multiplied.

  None if that is an array.
  """
  inner = dot_product(score)
  factor = inner.factor(query) if isinstance(inner, ScaledDot) else 1.0
  return float(factor) if isinstance(factor, numbers.Real) else None
