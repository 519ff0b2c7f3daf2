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

from attention import axes
from attention.custom_transpose import with_own_derivatives
from attention.implementations.non_finite import (
  any_flagged,
  finite_tokens,
  with_finite_tokens,
)
from attention.matmul import matmul_precision, weighted_sum
from attention.normalizers import is_softmax, masked_weights
from attention.positional import TilePositions, positions
from attention.request import Request, of_denominator
from attention.softmax import (
  Statistics,
  of_rows,
  part_of,
  softmax,
  with_sink,
)


@dataclasses.dataclass(frozen=True)
class Reference:
  """The dense formula, for every request of every size."""

  def obstacle(self, request: Request) -> str | None:
    """None: the reference serves every request."""
    del request
    return None

  def __call__(self, request: Request) -> tuple[jax.Array, Statistics | None]:
    """The context [..., T, E] and, where needed, the statistics [..., T]."""
    if _is_marked(request):
      return _marked_context(request), None
    context, statistics = with_finite_tokens(request, _context_and_statistics)
    assert statistics is not None
    return context, statistics


def weights(request: Request) -> jax.Array:
  """The distribution over keys of each query, [..., T, S]."""
  weights, statistics = with_finite_tokens(request, _weights_and_statistics)
  if request.score.denominator is not None:
    _, total = with_finite_tokens(
      of_denominator(request), _weights_and_statistics
    )
    assert statistics is not None
    assert total is not None
    weights = weights * statistics.relative_to(total)[..., None]
    statistics = total
  sink = getattr(request.normalizer, "sink", None)
  if sink is None or statistics is None:
    return weights
  return with_sink(weights, statistics, sink)[0]


def _is_marked(request):
  """Whether NaN in the scores marks rows, without a pass for flags of rows."""
  return (
    request.is_masked
    and is_softmax(request.normalizer)
    and request.combined is None
    # The lse of a row with a NaN value is finite.
    and not request.return_lse
    # Other leading axes of values would be axes of the marked scores.
    and request.leading == request.scores_shape[:-2]
  )


def _marked_context(request):
  """The context; NaN in the scores marks rows, without a pass for flags."""
  request, (bad_query, bad_key, bad_value) = finite_tokens(request)
  sum_of = functools.partial(
    _marked_sum, request.dtype, request.precision, _softmax_of(request)
  )

  def function(residuals, arguments):
    scores, visible, bad_query, bad_key, *multiplier = residuals
    value, bad_value = arguments
    flags = bad_key | bad_value, bad_query
    return [sum_of(scores, visible, flags, multiplier, value)]

  def transpose(residuals, cotangents):
    # `jax.linear_transpose` assumes that all values are finite.
    def linear(value):
      return function(residuals, [value, jnp.zeros_like(bad_key)])

    _, pull_back = jax.vjp(linear, jnp.zeros(value.shape, value.dtype))
    return [*pull_back(cotangents), None]

  value = _value(request)
  residuals = [*_scores(request), bad_query, bad_key, *_multiplier(request)]
  values = axes.varying_alike([*residuals, value, bad_value])
  (context,) = with_own_derivatives(
    function, transpose, values[:-2], values[-2:]
  )
  return context


def _softmax_of(request):
  """`softmax` for the scores of a request."""
  return functools.partial(softmax, may_hide=not request.score.is_finite)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _marked_sum(
  dtype, precision, softmax_of, scores, visible, flags, multiplier, value
):
  """The context; rows that attend to flagged tokens are NaN."""
  # NaN spreads through the softmax, without a kernel for flags of rows.
  del precision
  keys, queries = flags
  marks = queries[..., :, None] | keys[..., None, :]
  weights, _ = softmax_of(jnp.where(marks, jnp.nan, scores), visible)
  return weighted_sum(math.prod(multiplier, start=weights), value, dtype)


@_marked_sum.defjvp
def _marked_sum_jvp(dtype, precision, softmax_of, primals, tangents):
  # Where derivatives are needed, finite rows are computed and then replaced.
  def differentiable(scores, visible, flags, multiplier, value):
    weights, _ = softmax_of(scores, visible)
    weights = math.prod(multiplier, start=weights)
    context = weighted_sum(weights, value, dtype)
    bad = any_flagged(visible, *flags)
    return jnp.where(bad[..., None], jnp.nan, context)

  with matmul_precision(precision):
    return jax.jvp(differentiable, primals, tangents)


def _weights_and_statistics(request):
  scores, visible = _scores(request)

  rows_attending = functools.partial(any_flagged, visible)

  if is_softmax(request.normalizer):
    return *_softmax_of(request)(scores, visible), rows_attending
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
  weights = math.prod(_multiplier(request), start=weights)
  return weighted_sum(weights, _value(request), request.dtype)


def _multiplier(request) -> list[jax.Array]:
  """The factors by which dropout multiplies the weights, if there are any."""
  if request.dropout is None:
    return []
  shape = (*request.leading, *request.scores_shape[-2:])
  return [request.dropout.multiplier(shape, request.dtype)]


def _value(request):
  """The value in the dtype of the products."""
  return request.value.astype(jnp.result_type(request.query, request.value))


def _shard_of(request, context, statistics):
  """The result over all shards, with the derivatives of this one."""
  # With the weights P of this shard's keys, for constant statistics, these are
  # d lse = d sum(P) and d context = d (P value) - d lse context.
  hold = jax.lax.stop_gradient
  scores, visible = _scores(request)
  weights = hold(statistics).weights(jnp.where(visible, scores, -jnp.inf))
  of_lse = jnp.sum(weights, axis=-1)
  of_context = _weighted_sum(request, weights)
  of_context = of_context - of_lse[..., None] * context
  of_statistics = statistics.tangent(of_lse - hold(of_lse))
  return (
    context + of_context - hold(of_context),
    jax.tree.map(jnp.add, statistics, of_statistics),
  )


def _scores(request):
  """Scores and bias, finite, and which pairs are visible; they broadcast."""
  rank = request.query.ndim
  # Computed positions: constants would become an array of all pairs.
  rows, columns = (
    TilePositions(0, length) if isinstance(length, int) else positions(length)
    for length in request.scores_shape[-2:]
  )
  scores = request.score(request.query, request.key).astype(request.dtype)
  visible = jnp.ones((1,) * rank, bool)
  if request.mask is not None:
    visible = axes.with_rank(request.mask.block(rows, columns, rank - 2), rank)
    visible = jnp.asarray(visible)
  if request.bias is not None:
    bias = axes.with_rank(request.bias.block(rows, columns, rank - 2), rank)
    if request.bias.may_hide:
      allowed = ~jnp.isneginf(bias)
      bias = jnp.where(allowed, bias, 0.0)
      visible = visible & allowed
    scores = scores + bias.astype(request.dtype)
  return scores, visible
