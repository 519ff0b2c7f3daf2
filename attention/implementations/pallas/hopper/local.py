"""Local-p in Hopper kernels: its predicted positions are numbers of queries.

The score itself has the prediction as one more feature of mapped queries, of
which kernels would need a multiple of 64. Kernels predict the positions of
their own queries, see predictions.py, or XLA does before them.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.head_parameters import BY_POSITION, SCALAR
from attention.implementations.pallas.hopper.terms import token_maps
from attention.implementations.pallas.hopper.terms.prediction_arrays import (
  MATRIX,
  SHARES,
  VECTOR,
  Prediction,
)
from attention.implementations.pallas.hopper.tiles import matrices
from attention.implementations.pallas.hopper.tiles.layout import SIDE
from attention.implementations.pallas.operands import Operand, of_parameter
from attention.implementations.pallas.wrapped import wrappers
from attention.request import Request
from attention.scores.base import Wrapper
from attention.scores.classical import Dot
from attention.scores.luong_local import Local


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Centered(Wrapper):
  """`Local` for known shares p / S of queries, [..., T]."""

  share: jax.Array = dataclasses.field(metadata=BY_POSITION)
  length: Any = dataclasses.field(metadata=SCALAR)  # S, if not causal
  window: float = dataclasses.field(metadata={"static": True})
  causal: bool = dataclasses.field(metadata={"static": True})
  has_gaussian: bool = dataclasses.field(metadata={"static": True})

  @property
  def reads_positions(self):
    """See `Score`."""
    return True

  @property
  def denominator(self):
    """See `Local`."""
    if not self.has_gaussian:
      return super().denominator
    return dataclasses.replace(self, has_gaussian=False)

  def pair_at(self, query, key, positions):
    """See `Local`."""
    scores = self.score.pair_at(query, key, positions)
    rows, columns = positions.broadcast(scores.ndim)
    share = positions.at_queries(self.share)
    length = rows + 1 if self.causal else self.length
    length = jnp.asarray(length, share.dtype)
    length = length if self.causal else length[..., None, None]
    share, length, scores = axes.aligned(share, length, scores)
    distance = columns.astype(share.dtype) - share * length
    if self.has_gaussian:
      scores = scores - 2.0 * jnp.square(distance / self.window)
    return jnp.where(abs(distance) <= self.window, scores, -jnp.inf)


def of_request(request: Request) -> Prediction | None:
  """What kernels predict, if they read unmapped tokens; None if XLA does."""
  found = [
    each
    for each in wrappers(request.score)
    if isinstance(each, Local) and _predicts(each)
  ]
  if len(found) != 1:
    return None
  rank, local = len(request.leading), found[0]
  if isinstance(_outer_maps(request, local), Wrapper):
    return None
  operands = {
    MATRIX: of_parameter(local.query_weight, 2, rank),
    VECTOR: of_parameter(local.position_weight, 1, rank),
  }
  shares = jnp.zeros(request.query.shape[-2], jnp.float32)
  score = _with_shares(request, request.score, lambda _: shares)
  if not _has_kernels(request, operands):
    return None
  return Prediction(
    score,
    shares,
    differentiable=operands,
    unread_by_keys=operands,
    own_numbers=(SHARES,),
  )


def _has_kernels(request: Request, operands: dict[str, Operand]) -> bool:
  """Whether kernels predict from tokens and arrays like these."""
  query, matrix = request.query, operands[MATRIX]
  return (
    len({each.dtype for each in request.tokens}) == 1
    and query.dtype.itemsize == 2
    and query.shape[-1] in (SIDE, 2 * SIDE)
    and request.value.shape[-1] % SIDE == 0
    and query.shape[:-2] == request.leading
    and matrices.has_terms(matrix.array, query)
    and matrix.core[-1] % SIDE == 0
  )


def with_shares(request: Request) -> Request:
  """The request with shares that XLA predicts in place of predictions."""
  shares = functools.partial(_shares, request)
  score = _with_shares(request, request.score, shares)
  return dataclasses.replace(request, score=score)


def _with_shares(
  request: Request, score: Any, shares: Callable[[Local], jax.Array]
) -> Any:
  """The score with known shares in place of predictions."""
  if not isinstance(score, Wrapper):
    return score
  inner = _with_shares(request, score.score, shares)
  if isinstance(score, Local) and _predicts(score):
    length = request.scores_shape[-1] if score.length is None else score.length
    return Centered(
      inner,
      shares(score),
      length,
      score.window,
      score.causal,
      score.has_gaussian,
    )
  return dataclasses.replace(score, score=inner)


def _predicts(score: Any) -> bool:
  return type(score) is Local and score.query_weight is not None


def _outer_maps(request: Request, local: Local) -> Any:
  """The score that maps queries as the wrappers around local-p do."""
  score: Any = Dot()
  outer = itertools.takewhile(
    lambda each: each is not local, wrappers(request.score)
  )
  for each in reversed([*filter(token_maps.changes_tokens, outer)]):
    if not isinstance(each, Local):
      score = dataclasses.replace(each, score=score)
  return score


def _shares(request: Request, score: Local) -> jax.Array:
  """The predictions, for zeros in place of NaN if keys may be hidden."""
  query = request.query
  if request.is_masked:
    query = jnp.where(jnp.isfinite(query), query, jnp.zeros_like(query))
  return score.shares(_outer_maps(request, score).map_query(query))
