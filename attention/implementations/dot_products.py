"""Scores that are dot products of mapped tokens."""

import numbers

from attention.scores import Score
from attention.scores.base import Placed
from attention.scores.classical import DotProduct, ScaledDot
from attention.scores.wrappers import MappedKeys, QueryKeyNorm

# Wrappers that change tokens only.
_OF_TOKENS = (Placed, MappedKeys, QueryKeyNorm)


def dot_product(score: Score) -> DotProduct | None:
  """The dot product of mapped tokens that a score computes, or None."""
  while isinstance(score, _OF_TOKENS):
    score = score.score
  return score if isinstance(score, DotProduct) else None


def constant_factor(score: Score, query) -> float | None:
  """By which the products of half-precision tokens are multiplied.

  None if that is an array.
  """
  inner = dot_product(score)
  factor = inner.factor(query) if isinstance(inner, ScaledDot) else 1.0
  return float(factor) if isinstance(factor, numbers.Real) else None
