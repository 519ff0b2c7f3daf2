"""What a trace of a score shows: its shape and its memory."""

import math
from collections.abc import Iterator

import jax

from attention.scores.base import Score
from attention.scores.decay import with_running_sums
from attention.scores.pairwise import (
  check_pairwise,
  follows_leading,
  pair_jaxpr,
)
from attention.transforms.dependence import equations


def trace_score(score: Score, query, key) -> tuple[jax.ShapeDtypeStruct, int]:
  """The shape of the scores and the elements per pair, by one trace."""
  # Raises ValueError if a score without positions depends on other tokens.
  results = []

  def trace(query, key):
    score.check(query, key)
    query, key = score.map_query(query), score.map_key(key)
    closed, result = pair_jaxpr(with_running_sums(score), query, key)
    elements = 1  # also if sizes are symbols of `jax.export`
    if all(isinstance(size, int) for size in (*query.shape, *key.shape)):
      largest = max(_sizes(closed.jaxpr), default=0)
      if largest > max(query.size, key.size):  # else the tokens, reshaped
        pairs = math.prod(getattr(result, "shape", ()))
        elements = max(round(largest / max(pairs, 1)), 1)
      check_pairwise(score, query, key, closed)
    results.append((result, elements))

  jax.eval_shape(trace, query, key)
  return results[0]


def is_of_each_head(score: Score, query, key) -> bool:
  """Whether each entry of the leading axes has scores of its own."""
  found = []

  def trace(query, key):
    mapped = score.map_query(query), score.map_key(key)
    found.append(follows_leading(score, *mapped))

  jax.eval_shape(trace, query, key)
  return found[0]


def _sizes(jaxpr) -> Iterator[int]:
  """The numbers of elements of all arrays that a jaxpr makes."""
  for equation in equations(jaxpr):
    for variable in equation.outvars:
      yield variable.aval.size
