"""Local-p in Hopper kernels: its predicted positions are numbers of queries.

The score itself has the prediction as one more feature of mapped queries, of
which kernels would need a multiple of 64.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attention import axes
from attention.head_parameters import BY_POSITION, SCALAR
from attention.implementations.pallas.hopper.wrapped import wrappers
from attention.request import Request
from attention.scores.base import Wrapper
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


def with_centers(request: Request) -> Request:
  """The request with a score that has no predictions to make."""
  if not any(map(_predicts, wrappers(request.score))):
    return request
  score = _with_centers(request, request.score)
  return dataclasses.replace(request, score=score)


def _with_centers(request: Request, score: Any) -> Any:
  if not isinstance(score, Wrapper):
    return score
  inner = _with_centers(request, score.score)
  if isinstance(score, Local) and _predicts(score):
    length = request.scores_shape[-1] if score.length is None else score.length
    return Centered(
      inner,
      _shares(request, score),
      length,
      score.window,
      score.causal,
      score.has_gaussian,
    )
  return dataclasses.replace(score, score=inner)


def _predicts(score: Any) -> bool:
  return type(score) is Local and score.query_weight is not None


def _shares(request: Request, score: Local) -> jax.Array:
  """The predictions, for zeros in place of NaN if keys may be hidden."""
  query = request.query
  if request.is_masked:
    query = jnp.where(jnp.isfinite(query), query, jnp.zeros_like(query))
  return score.shares(query)
