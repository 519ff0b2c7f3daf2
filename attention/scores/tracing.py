"""What one trace of a score shows: its shape, its memory, its positions."""

import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from attention.scores.base import Score, Wrapper
from attention.scores.tile_positions import all_positions

_POSITIONS = (
  "score computes positions from the number of queries or keys, but attend "
  "calls it on blocks of them, whose positions do not start at 0. Use "
  "attention.scores.positional(function), which calls function(query, key, "
  "query_positions, key_positions), or define Score.pair_at."
)


def trace_score(score: Score, query, key) -> tuple[jax.ShapeDtypeStruct, int]:
  """The shape of the scores and the elements per pair, by one trace."""
  # Raises ValueError if a score without positions computes its own.
  results = []

  def trace(query, key):
    score.check(query, key)
    query, key = score.map_query(query), score.map_key(key)
    closed, result = _jaxpr(score, query, key)
    elements = 1  # also if sizes are symbols of `jax.export`
    if all(isinstance(size, int) for size in (*query.shape, *key.shape)):
      largest = max(_sizes(closed.jaxpr), default=0)
      if largest > max(query.size, key.size):  # else the tokens, reshaped
        pairs = math.prod(getattr(result, "shape", ()))
        elements = max(round(largest / max(pairs, 1)), 1)
      _check_pairwise(score, query, key, closed)
    results.append((result, elements))

  jax.eval_shape(trace, query, key)
  return results[0]


def _jaxpr(score: Score, query, key):
  """The score of mapped tokens as a jaxpr, and the shape of its result."""

  def pair(query, key):
    return score.pair_at(query, key, all_positions(query, key))

  return jax.make_jaxpr(pair, return_shape=True)(query, key)


def _sizes(jaxpr) -> Iterator[int]:
  """The numbers of elements of all arrays that a jaxpr makes."""
  for equation in _equations(jaxpr):
    for variable in equation.outvars:
      yield variable.aval.size


def _equations(jaxpr) -> Iterator:
  for equation in jaxpr.eqns:
    yield equation
    inner = list(jaxprs_in_params(equation.params))
    if equation.params.get("branches_platforms"):
      # Of the branches of `jax.lax.platform_dependent`, the one for CPUs: the
      # others may be sums that accelerators fuse.
      inner = inner[:1]
    for each in inner:
      yield from _equations(each)


def _check_pairwise(score: Score, query, key, closed: ClosedJaxpr) -> None:
  """Raises ValueError if a score without positions computes its own."""
  inner = score
  while inner.reads_positions:
    if not isinstance(inner, Wrapper):
      return
    if type(inner).map_query is not Wrapper.map_query:
      return  # The wrapped score has other mapped queries.
    inner = inner.score
  if inner is not score:
    closed, _ = _jaxpr(inner, query, key)
  if not _has_positions(closed, (query.shape[-2], key.shape[-2])):
    return
  # The length may equal another size. Other lengths tell them apart.
  taken = {*query.shape, *key.shape}
  for equation in _equations(closed.jaxpr):
    for variable in (*equation.invars, *equation.outvars):
      taken |= {*getattr(variable.aval, "shape", ())}
  lengths = [n for n in range(5, 7 + len(taken)) if n not in taken][:2]
  query, key = (
    jax.ShapeDtypeStruct((*x.shape[:-2], length, x.shape[-1]), x.dtype)
    for x, length in zip((query, key), lengths)
  )
  try:
    closed, _ = _jaxpr(inner, query, key)
  except (AssertionError, TypeError, ValueError):
    return  # It captures arrays of all queries or keys, so it fails on tiles.
  if _has_positions(closed, lengths):
    raise ValueError(_POSITIONS)


def _has_positions(closed: ClosedJaxpr, lengths: Sequence[int]) -> bool:
  """Whether a jaxpr numbers the entries of an axis of one of these lengths."""
  for equation in _equations(closed.jaxpr):
    if equation.primitive.name == "iota":
      axis = equation.params["dimension"]
      if equation.outvars[0].aval.shape[axis] in lengths:
        return True
  return any(
    isinstance(constant, np.ndarray)
    and not {*constant.shape}.isdisjoint(lengths)
    and (constant != constant.flat[0]).any()
    for constant in closed.consts
  )
