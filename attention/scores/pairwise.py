"""Refuses a score without positions that is not a function of pairs.

`attend` calls a score on blocks of queries and keys. The result of a score
that numbers, sums, shifts or counts the tokens would depend on the blocks. A
trace with longer sequences than any other axis shows which axes are of tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from attention.scores.base import Score, Wrapper
from attention.scores.callables import FunctionScore
from attention.scores.tile_positions import all_positions

_RULE = (
  "score must be a function of pairs of a query and a key, because attend "
  "calls it on blocks of queries and keys, but it {}. A function of positions "
  "is attention.scores.positional(function), which calls function(query, key, "
  "query_positions, key_positions); an array [..., T, S] is a bias. To change "
  "all queries or keys, do it before attend."
)
# The parameters that name the axes along which an operation is not the same
# for every entry.
_AXES = ("axes", "axis", "dimension", "dimensions")
_ALONG_AXES = ("reduce", "arg", "cum", "sort", "rev", "split", "iota")


def pair_jaxpr(score: Score, query, key) -> tuple[ClosedJaxpr, Any]:
  """The score of mapped tokens as a jaxpr, and the shape of its result."""

  def pair(query, key):
    return score.pair_at(query, key, all_positions(query, key))

  return jax.make_jaxpr(pair, return_shape=True)(query, key)


def equations(jaxpr) -> Iterator:
  """The equations of a jaxpr and of those inside of it."""
  for equation in jaxpr.eqns:
    yield equation
    inner = list(jaxprs_in_params(equation.params))
    if equation.params.get("branches_platforms"):
      # Of the branches of `jax.lax.platform_dependent`, the one for CPUs: the
      # others may be sums that accelerators fuse.
      inner = inner[:1]
    for each in inner:
      yield from equations(each)


def check_pairwise(score: Score, query, key, closed: ClosedJaxpr) -> None:
  """Raises ValueError if a score without positions depends on other tokens.

  Args:
    score: the score.
    query: mapped queries [..., T, X].
    key: mapped keys [..., S, Y].
    closed: the score's jaxpr.
  """
  inner = score
  while inner.reads_positions and isinstance(inner, Wrapper):
    if type(inner).map_query is not Wrapper.map_query:
      return  # The wrapped score has other mapped queries.
    inner = inner.score
  if inner.reads_positions or _is_of_this_package(inner):
    return
  if inner is not score:
    closed, _ = pair_jaxpr(inner, query, key)
  longest = max(*query.shape, *key.shape)
  for equation in equations(closed.jaxpr):
    for variable in (*equation.invars, *equation.outvars):
      longest = max(longest, *getattr(variable.aval, "shape", ()), 0)
  # Multiples, since a function may split the tokens; different ones, since a
  # function may add queries to keys.
  lengths = [_multiple(x.shape[-2], longest) for x in (query, key)]
  lengths[1] += key.shape[-2] * (lengths[0] == lengths[1])
  tokens = (
    jax.ShapeDtypeStruct((*x.shape[:-2], length, x.shape[-1]), x.dtype)
    for x, length in zip((query, key), lengths)
  )
  try:
    longer, _ = pair_jaxpr(inner, *tokens)
  except Exception as error:
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    problem = f"fails for {lengths[0]} queries and {lengths[1]} keys: {reason}"
    raise ValueError(_RULE.format(problem)) from error
  problem = _dependence(longer, longest)
  if not problem and _numbers(closed) != _numbers(longer):
    again, _ = pair_jaxpr(inner, query, key)
    if _numbers(closed) == _numbers(again):  # else the function is not pure
      problem = "depends on the number of queries or keys"
  if problem:
    raise ValueError(_RULE.format(problem))


def _is_of_this_package(score: Score) -> bool:
  """Whether a score has no function or class of the user."""
  # Additive scores choose a formula by the largest of the tokens.
  while isinstance(score, Wrapper):
    score = score.score
  package = __name__.partition(".")[0] + "."
  is_ours = type(score).__module__.startswith(package)
  return is_ours and not isinstance(score, FunctionScore)


def _multiple(length: int, limit: int) -> int:
  """The first multiple of a length above a limit."""
  return length * (limit // max(length, 1) + 1)


def _dependence(longer: ClosedJaxpr, longest: int) -> str:
  """What makes the result depend on the block of tokens, or ""."""
  for equation in equations(longer.jaxpr):
    if any(size > longest for size in _combined(equation)):
      name = equation.primitive.name
      return f"computes `{name}` over the queries or the keys"
  for constant in longer.consts:
    if (
      isinstance(constant, np.ndarray)
      and max(constant.shape, default=0) > longest
      and (constant != constant.flat[0]).any()
    ):
      return "has an array with an entry for each query or key"
  return ""


def _combined(equation) -> Sequence[int]:
  """The sizes of axes whose entries an operation treats differently."""
  name, params = equation.primitive.name, equation.params
  if not equation.outvars:
    return []
  result = equation.outvars[0].aval.shape
  shape = equation.invars[0].aval.shape if equation.invars else result
  if name == "dot_general":
    return [shape[axis] for axis in params["dimension_numbers"][0][0]]
  if name == "concatenate":
    return [result[params["dimension"]]]
  if name == "scan":
    return [params["length"]] if params["num_carry"] else []
  if name == "gather":
    axes = params["dimension_numbers"].start_index_map
    sizes = params["slice_sizes"]
    return [shape[axis] for axis in axes if sizes[axis] != shape[axis]]
  if name.startswith("scatter"):
    axes = params["dimension_numbers"].scatter_dims_to_operand_dims
    return [shape[axis] for axis in axes]
  if name in ("pad", "slice", "dynamic_slice", "dynamic_update_slice"):
    if name == "dynamic_update_slice":
      result = equation.invars[1].aval.shape
    return [max(each) for each in zip(shape, result) if len({*each}) > 1]
  if name == "conv_general_dilated":
    return [shape[axis] for axis in params["dimension_numbers"].lhs_spec[2:]]
  if name.startswith("reduce_window"):
    return [n for n, m in zip(shape, params["window_dimensions"]) if m > 1]
  if name == "random_bits":
    return result
  if name in ("top_k", "fft"):
    return shape[-1:]
  if name.startswith(_ALONG_AXES):
    axes = next((params[each] for each in _AXES if each in params), ())
    return [shape[n] for n in ([axes] if isinstance(axes, int) else axes)]
  return []


def _numbers(closed: ClosedJaxpr) -> set[str]:
  """The constants of a jaxpr that are single numbers."""
  return {
    str(variable.val)
    for equation in equations(closed.jaxpr)
    for variable in equation.invars
    if isinstance(variable, Literal)
  }
