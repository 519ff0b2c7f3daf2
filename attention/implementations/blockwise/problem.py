"""From a score, a mask and a bias to functions of a tile."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention.dropout import Dropout
from attention.implementations.blockwise.closure import without_captured
from attention.implementations.blockwise.online_softmax import Captured, Problem
from attention.implementations.blockwise.positional import Pairs
from attention.implementations.blockwise.tiles import cut
from attention.scores.base import Score


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
  except (AssertionError, RuntimeError, TypeError, ValueError):
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
    cut(query, (0,) * query.ndim, tiling.row),
    cut(key, (0,) * key.ndim, tiling.column),
  )
  functions: list[Any] = [
    without_captured(functools.partial(scores, masked=masked), *tiles, start)
    for masked in (False, True)
  ]
  if dropout is None:
    functions.append((None, []))
  else:
    multiplier = functools.partial(pairs.multiplier, dropout)
    functions.append(without_captured(multiplier, start))
  (full, part, multiplier), captured = zip(*functions)
  problem = Problem(tiling, pairs.dtype, lse_leading, (full, part), multiplier)
  return problem, captured
