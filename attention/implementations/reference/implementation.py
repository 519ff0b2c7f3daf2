"""The dense formula, which tests compare every implementation with.

    scores  = score(query, key) + bias           where mask, else -inf
    lse     = logsumexp_j scores
    context = sum_j exp(scores - lse) * value

In every implementation, a row without a visible key has weights 0, context 0,
lse -inf and zero derivatives of any order. A masked key changes nothing, even
if it holds NaN or infinity. With a mask or a bias, a non-finite token makes the
rows that attend to it NaN, and no others.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from attention.arrays.matmul import weighted_sum
from attention.arrays.softmax import (
  Statistics,
  of_rows,
  part_of,
  softmax,
  with_sink,
)
from attention.implementations.non_finite import any_flagged, with_finite_tokens
from attention.implementations.reference import masked
from attention.implementations.reference.pairs import (
  multiplier,
  visible_and_bias,
)
from attention.normalizers import is_softmax, masked_weights
from attention.request import Request


@dataclasses.dataclass(frozen=True)
class Reference:
  """The dense formula, for every request of every size."""

  def obstacle(self, request: Request) -> str | None:
    """None: the reference serves every request."""
    del request
    return None

  def __call__(self, request: Request) -> tuple[jax.Array, Statistics | None]:
    """The context [..., T, E] and, where needed, the statistics [..., T]."""
    request = request.prepared
    if masked.serves(request):
      return masked.results(request)
    context, statistics = with_finite_tokens(request, _context_and_statistics)
    assert statistics is not None
    return context, statistics


def weights(request: Request) -> jax.Array:
  """The distribution over keys of each query, [..., T, S]."""
  request = request.prepared
  weights, statistics = with_finite_tokens(request, _weights_and_statistics)
  sink = getattr(request.normalizer, "sink", None)
  if sink is None or statistics is None:
    return weights
  return with_sink(weights, statistics, sink)[0]


def _softmax_of(request):
  """`softmax` for the scores of a request."""
  may_hide = not request.score.is_finite
  has_keys = isinstance(request.scores_shape[-1], int)  # or a symbol
  has_keys = has_keys and request.scores_shape[-1] > 0
  may_be_empty = may_hide or request.is_masked or not has_keys
  return functools.partial(
    softmax, may_hide=may_hide, may_be_empty=may_be_empty
  )


def _weights_and_statistics(request):
  scores, visible = _scores(request, request.score)

  rows_attending = functools.partial(any_flagged, visible)

  if is_softmax(request.normalizer):
    distribution = _softmax_of(request)
    weights, statistics = distribution(scores, visible)
    if request.score.denominator is not None:
      _, total = distribution(*_scores(request, request.score.denominator))
      weights = weights * statistics.relative_to(total)[..., None]
      statistics = total
    return weights, statistics, rows_attending
  scores = jnp.where(visible, scores, -jnp.inf)
  weights = masked_weights(request.normalizer, scores)
  statistics = of_rows(jnp.any(visible, axis=-1), request.dtype)
  return weights, statistics, rows_attending


def _context_and_statistics(request):
  if request.combined is not None and is_softmax(request.normalizer):
    return *_shard_of(request, *request.combined), None
  weights, statistics, rows_attending = _weights_and_statistics(request)
  context = _weighted_sum(request, weights)
  if request.combined is not None:
    return *part_of(request.combined, context), None
  return context, statistics.broadcast_to(context.shape[:-1]), rows_attending


def _weighted_sum(request, weights):
  """The sum of values by weights, after dropout."""
  weights = math.prod(multiplier(request), start=weights)
  return weighted_sum(weights, _value(request), request.dtype)


def _value(request):
  """The value in the dtype of the products."""
  return request.value.astype(jnp.result_type(request.query, request.value))


def _shard_of(request, context, statistics):
  """The result over all shards, with the derivatives of this one."""
  # With the weights P of this shard's keys, for constant statistics, these are
  # d lse = d sum(P) and d context = d (P value) - d lse context.
  hold = jax.lax.stop_gradient

  def weights_by(score):
    scores, visible = _scores(request, score)
    return statistics.weights(jnp.where(visible, scores, -jnp.inf))

  weights = weights_by(request.score)
  denominator = request.score.denominator
  parts = weights if denominator is None else weights_by(denominator)
  total = jnp.sum(parts, axis=-1)
  average = _weighted_sum(request, weights) - total[..., None] * context
  d_statistics = statistics.tangent(total - hold(total))
  return (
    context + average - hold(average),
    jax.tree.map(jnp.add, statistics, d_statistics),
  )


def _scores(request, score):
  """Scores and bias, finite, and which pairs are visible; they broadcast."""
  scores = score(request.query, request.key).astype(request.dtype)
  visible, bias = visible_and_bias(request)
  return sum(bias, scores), visible
