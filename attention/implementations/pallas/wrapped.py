"""A score, the wrappers around it, and the score that they change."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from attention.scores import Score
from attention.scores.base import Placed, Wrapper


def base(score: Any) -> Any:
  """The score that wrappers change."""
  for wrapper in wrappers(score):
    score = wrapper.score
  return score


def wrappers(score: Any) -> Iterator[Wrapper]:
  """The wrappers of a score, from the outside."""
  while isinstance(score, Wrapper):
    yield score
    score = score.score


def offset_of_keys(score: Any) -> Any:
  """The position of the first key relative to the first query."""
  placed = [each for each in wrappers(score) if isinstance(each, Placed)]
  return sum(each.column - each.row for each in placed)


def with_base(score: Any, replacement: Score) -> Score:
  """The score with another one in place of that which wrappers change."""
  if not isinstance(score, Wrapper):
    return replacement
  inner = with_base(score.score, replacement)
  return dataclasses.replace(score, score=inner)
