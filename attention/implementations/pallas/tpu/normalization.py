"""The normalizer of a tile in kernels for TPUs: numerators and their sum.

Weights are numerators / (sum of parts + epsilon), see `OnlineNormalizer`. All
functions are of scores [t, s], or of pairs of scores for `Quotient`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from attention.normalizers import is_softmax


def bounded(problem: Any, maximum: jax.Array) -> jax.Array:
  """The maximum [t, 1] that terms are relative to."""
  smallest = problem.normalizer.smallest_maximum
  return maximum if smallest == -jnp.inf else jnp.maximum(maximum, smallest)


def terms(
  problem: Any, scores: Any, maximum: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Numerators and parts, for a maximum that no exponent exceeds."""
  if is_softmax(problem.normalizer):
    exponentials = jnp.exp(scores - maximum)
    return exponentials, exponentials
  return problem.normalizer.terms(scores, maximum)


def weights_and_gradient(
  problem: Any, scores: Any, rows: Any, of_weights: jax.Array
) -> tuple[jax.Array, Any]:
  """The weights, and the cotangents of the scores for those of the weights."""
  if is_softmax(problem.normalizer):
    exponents = jnp.minimum(scores - rows.maximum, 0.0)
    weights = jnp.exp(exponents) * rows.inverse
    return weights, weights * (of_weights - rows.mean)
  (numerators, parts), pull_back = jax.vjp(
    lambda scores: problem.normalizer.terms(scores, rows.maximum), scores
  )
  of_sum = jnp.broadcast_to(-rows.mean * rows.inverse, parts.shape)
  (of_scores,) = pull_back((of_weights * rows.inverse, of_sum))
  # Derivatives of terms may not be finite at -inf.
  return numerators * rows.inverse, jax.tree.map(
    lambda scores, gradient: jnp.where(scores == -jnp.inf, 0.0, gradient),
    scores,
    of_scores,
  )
