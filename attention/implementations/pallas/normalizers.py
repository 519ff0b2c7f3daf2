"""Normalizers as kernels compute them: one tile of keys after another."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.head_parameters import SCALAR
from attention.implementations.pallas.operands import Unsupported
from attention.normalizers import (
  Normalizer,
  OnlineNormalizer,
  is_online,
  is_softmax,
  sigmoid,
)
from attention.request import Request
from attention.scores.base import Wrapper


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise(OnlineNormalizer):
  """A normalizer whose weights depend on their own scores, without a sum."""

  epsilon = 1.0
  smallest_maximum = 0.0
  normalizer: Normalizer = dataclasses.field(metadata={"static": True})

  def exponents(self, scores):
    """Zeros, so that the maximum is 0."""
    return jnp.where(scores == -jnp.inf, -jnp.inf, 0.0)

  def terms(self, scores, maximum):
    """The weights, and no parts of a sum."""
    del maximum
    hidden = scores == -jnp.inf
    # Derivatives at -inf may not be finite.
    weights = self.normalizer(jnp.where(hidden, 0.0, scores))
    return jnp.where(hidden, 0.0, weights), jnp.zeros_like(weights)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Offset(Wrapper):
  """score + offset, for one offset of each head."""

  offset: jax.Array = dataclasses.field(metadata=SCALAR)

  def pair_at(self, query, key, positions):
    """See `Score`."""
    scores = self.score.pair_at(query, key, positions)
    offset = self.offset[..., None, None].astype(scores.dtype)
    scores, offset = axes.aligned(scores, offset)
    return scores + offset


def with_online_normalizer(request: Request) -> Request:
  """The request with an `OnlineNormalizer` without arrays.

  Raises:
    Unsupported: if a weight depends on all scores of its row in another way.
  """
  normalizer = request.normalizer
  if is_softmax(normalizer) or is_online(normalizer):
    return request
  score = request.score
  if type(normalizer) is sigmoid and _has_arrays(normalizer):
    score = Offset(score, jnp.asarray(normalizer.bias))
    normalizer = sigmoid()
  if normalizer.is_elementwise and not _has_arrays(normalizer):
    normalizer = Elementwise(normalizer)
    return dataclasses.replace(request, score=score, normalizer=normalizer)
  raise Unsupported(
    "computes softmax, normalizers.OnlineNormalizer and elementwise normalizers"
    f" without arrays, got {type(normalizer).__name__}"
  )


def _has_arrays(normalizer: Any) -> bool:
  leaves = jax.tree.leaves(normalizer)
  return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
