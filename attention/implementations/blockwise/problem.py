"""Functions of a tile, made from a score, a mask, a bias and dropout."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.dropout import Dropout
from attention.implementations.blockwise.closure import without_captured
from attention.implementations.blockwise.online_softmax import Captured, Problem
from attention.implementations.blockwise.positional import Pairs
from attention.implementations.blockwise.tiles import Tiling, cut
from attention.scores.base import Score

# A function whose first argument is the list of arrays that it captured.
Traced = tuple[Callable, list[Any]]


def trace_pair(
  score: Score,
  query: jax.Array,
  key: jax.Array,
  tiling: Tiling,
  blocks: Sequence[tuple[int, ...]],
) -> tuple[Traced, Tiling]:
  """The score of a tile, and the tiling with the first block that it supports.

  A score whose arrays have leading axes (heads) needs blocks with all entries
  of these axes. Every score supports the last block. Tokens are mapped.
  """
  whole = jnp.broadcast_shapes(query.shape[:-2], key.shape[:-2])
  for block in blocks[:-1]:
    tiling = dataclasses.replace(tiling, block=block)
    shape = tuple(map(min, block, whole))
    try:
      return _trace_pair(score, query, key, tiling, shape), tiling
    except (AssertionError, RuntimeError, TypeError, ValueError):
      pass
  tiling = dataclasses.replace(tiling, block=blocks[-1])
  return _trace_pair(score, query, key, tiling), tiling


def _trace_pair(score, query, key, tiling, leading=None) -> Traced:
  def pair(query, key):
    scores = score.pair(query, key)
    if leading is not None and scores.shape[:-2] != leading:
      raise ValueError("the score does not follow its arguments' shapes")
    return scores

  return without_captured(
    pair,
    cut(query, (0,) * query.ndim, tiling.row),
    cut(key, (0,) * key.ndim, tiling.column),
  )


def make_problem(
  pair: Traced,
  pairs: Pairs,
  dropout: Dropout | None,
  lse_leading: tuple[int, ...],
) -> tuple[Problem, Captured]:
  """The functions of a tile, and the arrays that they captured."""
  tiling = pairs.tiling
  start = (jax.ShapeDtypeStruct((), jnp.int32),) * (len(tiling.leading) + 2)
  multiplier = functools.partial(pairs.multiplier, dropout)
  traced: list[tuple[Any, list[Any]]] = [pair]
  for function, is_needed in (
    (pairs.bias_tile, pairs.bias is not None),
    (pairs.visible, tiling.has_partial),
    (multiplier, dropout is not None),
  ):
    traced.append(
      without_captured(function, start) if is_needed else (None, [])
    )
  functions, captured = zip(*traced)
  problem = Problem(tiling, pairs.dtype, lse_leading, *functions)
  return problem, Captured(*captured)
