"""Normalizers as kernels compute them: one tile of keys after another."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.arrays import axes
from attention.arrays.head_parameters import SCALAR
from attention.implementations.pallas.operands import Unsupported
from attention.normalizers import (
  Normalizer,
  OnlineNormalizer,
  entmax,
  is_online,
  is_softmax,
  sigmoid,
  sparsemax,
)
from attention.request import Request
from attention.scores.base import Wrapper

# Newton's method ends if all steps are smaller: the error of a peak is then
# about the square of that.
STEP, MOST_STEPS = 1e-4, 50
_TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Elementwise(OnlineNormalizer):
  """A normalizer whose weights depend on their own scores, without a sum."""

  epsilon = 1.0
  smallest_maximum = 0.0
  normalizer: Normalizer = dataclasses.field(metadata={"static": True})

  def exponents(self, scores):
    """Zeros, so that the maximum is 0."""
    hidden = scores == -jnp.inf
    return jnp.where(hidden, scores, jnp.zeros_like(scores))

  def terms(self, scores, maximum):
    """The weights, and no parts of a sum."""
    del maximum
    hidden = scores == -jnp.inf
    # Derivatives at -inf may not be finite.
    weights = self.normalizer(jnp.where(hidden, 0.0, scores))
    return jnp.where(hidden, 0.0, weights), jnp.zeros_like(weights)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sparse(OnlineNormalizer):
  """max(1 + (score - peak) / power, 0) ** power, for the peaks of rows.

  Entmax or sparsemax. The peak is the score whose weight would be 1, and the
  weights of a row sum to 1. Kernels find the peaks by Newton's method, and
  have them in place of the maximum and the number 1 in place of the total.
  """

  normalizer: entmax | sparsemax = dataclasses.field(metadata={"static": True})

  @property
  def power(self) -> float:
    """The power of the formula."""
    return self.normalizer.power

  def terms(self, scores, maximum):
    """The weights, twice: each is a numerator and its own part."""
    weights = self.weights(scores, maximum)
    return weights, weights

  def weights(self, scores: jax.Array, peak: jax.Array) -> jax.Array:
    """The weights of scores [..., t, s] for peaks [..., t, 1]."""
    return self._power(scores, peak, self.power)

  def slopes(self, scores: jax.Array, peak: jax.Array) -> jax.Array:
    """The derivatives of the weights by the scores."""
    return self._power(scores, peak, self.power - 1.0)

  def step(self, total: jax.Array, slope: jax.Array) -> jax.Array:
    """What Newton's method adds to a peak.

    From the maximum of a row on, all steps are positive. The arguments are the
    sums of weights and of slopes; the step is 0 without any.
    """
    # The norm total ** (1 / power) is nearly linear in the peak.
    root = jnp.exp(jnp.log(jnp.maximum(total, _TINY)) / self.power)
    step = self.power * (total - total / root) / jnp.maximum(slope, _TINY)
    return jnp.where(total > 0.0, jnp.maximum(step, 0.0), 0.0)

  def _power(self, scores, peak, exponent: float) -> jax.Array:
    base = 1.0 + (scores - peak) / self.power
    is_zero = base <= 0.0  # not for NaN, which stays NaN
    base = jnp.where(is_zero, 1.0, base)
    if exponent == 0.0:
      result = 1.0 + 0.0 * base
    elif exponent == 1.0:
      result = base
    elif exponent == 2.0:
      result = base * base
    else:
      result = jnp.exp(exponent * jnp.log(base))
    return jnp.where(is_zero, 0.0, result)


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

  Entmax and sparsemax become `Sparse`.

  Raises:
    Unsupported: if a weight depends on all scores of its row in another way.
  """
  normalizer = request.normalizer
  if is_softmax(normalizer) or is_online(normalizer):
    return request
  if type(normalizer) is entmax or type(normalizer) is sparsemax:
    return dataclasses.replace(request, normalizer=Sparse(normalizer))
  score = request.score
  if type(normalizer) is sigmoid and _has_arrays(normalizer):
    score = Offset(score, jnp.asarray(normalizer.bias))
    normalizer = sigmoid()
  if normalizer.is_elementwise and not _has_arrays(normalizer):
    normalizer = Elementwise(normalizer)
    return dataclasses.replace(request, score=score, normalizer=normalizer)
  raise Unsupported(
    "computes softmax, entmax, sparsemax, normalizers.OnlineNormalizer and "
    f"elementwise normalizers without arrays, got {type(normalizer).__name__}"
  )


def _has_arrays(normalizer: Any) -> bool:
  leaves = jax.tree.leaves(normalizer)
  return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
