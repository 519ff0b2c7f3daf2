"""From a score, a mask and a bias to functions of a tile."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun, jaxprs_in_params

from attention.blockwise.pairs import Pairs
from attention.blockwise.softmax import Captured, Problem
from attention.blockwise.tiling import cut
from attention.dropout import Dropout
from attention.scores.protocol import Score


def shapes(score, query, key, value):
  """The shape of the scores and the leading axes of the context."""
  scores = jax.eval_shape(
    lambda query, key: score.pair(score.map_query(query), score.map_key(key)),
    query,
    key,
  ).shape
  return scores, jnp.broadcast_shapes(scores[:-2], value.shape[:-2])


def numbers_per_pair(score: Score, query: jax.Array, key: jax.Array) -> int:
  """How many numbers a score needs at once for a query and a key.

  Args:
    score: a bound score.
    query: [..., T, Dq].
    key: [..., S, Dk].

  Returns:
    1 for a dot product, D where all of query - key is made.

  Example:
    >>> from attention.scores import as_score
    >>> apart = as_score(lambda q, k: -abs(q[:, None] - k[None]).sum(-1))
    >>> numbers_per_pair(apart, jnp.ones((64, 3)), jnp.ones((64, 3)))
    3
  """
  query, key = jax.eval_shape(
    lambda query, key: (score.map_query(query), score.map_key(key)), query, key
  )
  closed = jax.make_jaxpr(score.pair)(query, key)
  pairs = max(math.prod(closed.out_avals[0].shape), 1)
  return max(1, -(-_largest(closed.jaxpr) // pairs))


def _largest(jaxpr) -> int:
  """The size of the largest array that a computation makes."""
  sizes = [0]
  for equation in jaxpr.eqns:
    sizes += [variable.aval.size for variable in equation.outvars]
    sizes += map(_largest, jaxprs_in_params(equation.params))
  return max(sizes)


def fits(score, query, key, block) -> bool:
  """Whether `score` can be called on `block` of its leading axes.

  What it captures may have these axes too, and then it must see all of them.
  """

  def scores(query, key):
    start = (0,) * len(block)
    query, key = score.map_query(query), score.map_key(key)
    whole = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    pairs = score.pair(cut(query, start, block), cut(key, start, block))
    if pairs.shape[:-2] != tuple(map(min, block, whole)):
      raise TypeError("the score does not follow its arguments' shapes")
    return pairs

  try:
    jax.eval_shape(scores, query, key)
  except (AssertionError, TypeError, ValueError):
    return False
  return True


def make_problem(
  score: Score,
  pairs: Pairs,
  dropout: Dropout | None,
  lse_leading: tuple[int, ...],
  query: jax.Array,
  key: jax.Array,
) -> tuple[Problem, Captured]:
  """The functions of a tile, and apart from them the arrays they capture.

  Apart, so that a custom derivative rule gives these gradients too, whatever
  trace they belong to.

  Args:
    score: a bound score.
    pairs: the mask and the bias.
    dropout: dropout of the weights or None.
    lse_leading: the leading axes of the scores.
    query: [..., T, X], mapped.
    key: [..., S, Y], mapped.

  Returns:
    The problem, and what to bind it to.
  """
  tiling = pairs.tiling

  def scores(query, key, start, *, masked):
    scores = pairs.biased(score.pair(query, key).astype(pairs.dtype), start)
    if masked:
      scores = jnp.where(pairs.visible(start), scores, -jnp.inf)
    return scores

  start = (jax.ShapeDtypeStruct((), jnp.int32),) * (len(tiling.leading) + 2)
  tiles = (
    jax.eval_shape(lambda: cut(query, (0,) * query.ndim, tiling.row)),
    jax.eval_shape(lambda: cut(key, (0,) * key.ndim, tiling.column)),
  )
  functions = [
    _without_captured(functools.partial(scores, masked=masked), *tiles, start)
    for masked in (False, True)
  ]
  if dropout is None:
    functions.append((None, []))
  else:
    multiplier = functools.partial(pairs.multiplier, dropout)
    functions.append(_without_captured(multiplier, start))
  (full, part, multiplier), captured = zip(*functions)
  problem = Problem(tiling, pairs.dtype, lse_leading, (full, part), multiplier)
  return problem, captured


def _without_captured(function: Callable, *arguments):
  """A function that takes what `function` captures, and what that is."""
  closed = jax.make_jaxpr(function)(*arguments)
  jaxpr = closed.jaxpr

  def pure(captured, *arguments):
    leaves = jax.tree.leaves(arguments)
    (result,) = jaxpr_as_fun(ClosedJaxpr(jaxpr, captured))(*leaves)
    return result

  return pure, list(closed.consts)
