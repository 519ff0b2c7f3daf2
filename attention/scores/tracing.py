"""What a trace of a score shows: its shape and its memory."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax

from attention.scores.base import Score
from attention.scores.decay import with_running_sums
from attention.scores.dependence import equations
from attention.scores.pairwise import (
  check_pairwise,
  follows_leading,
  pair_jaxpr,
)


class Traced(NamedTuple):
  """What a trace of a score shows."""

  result: jax.ShapeDtypeStruct
  elements_per_pair: int
  follows_leading: bool  # each entry of the leading axes has its own scores


def trace_score(score: Score, query, key) -> Traced:
  """Traces a score of tokens."""
  # Raises ValueError if a score without positions depends on other tokens.
  results = []

  def trace(query, key):
    score.check(query, key)
    query, key = score.map_query(query), score.map_key(key)
    closed, result = pair_jaxpr(with_running_sums(score), query, key)
    elements, follows = 1, True  # also if sizes are symbols of `jax.export`
    if all(isinstance(size, int) for size in (*query.shape, *key.shape)):
      largest = max(_sizes(closed.jaxpr), default=0)
      if largest > max(query.size, key.size):  # else the tokens, reshaped
        pairs = math.prod(getattr(result, "shape", ()))
        elements = max(round(largest / max(pairs, 1)), 1)
      check_pairwise(score, query, key)
      follows = follows_leading(score, query, key)
    results.append(Traced(result, elements, follows))

  jax.eval_shape(trace, query, key)
  return results[0]


def _sizes(jaxpr) -> Iterator[int]:
  """The numbers of elements of all arrays that a jaxpr makes."""
  for equation in equations(jaxpr):
    for variable in equation.outvars:
      yield variable.aval.size
