"""The dense formula, the oracle of every test.

    scores  = score(query, key) + bias           where mask, else -inf
    lse     = logsumexp_j scores
    context = sum_j exp(scores - lse) * value

What no formula says, and all implementations keep: a row that may attend to
nothing has weights 0, context 0, lse -inf and zero derivatives of any order;
a key that is masked out changes nothing, NaN and inf included; with a mask or a
bias, a non-finite token that a row does see makes that row NaN, and no other
row.
"""

import jax
import jax.numpy as jnp

from attention import axes
from attention.positional import positions
from attention.request import Request, without_bad_tokens


def masked_softmax(
  scores: jax.Array, visible: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Softmax over the last axis where `visible`, and its log-sum-exp.

  Args:
    scores: [..., S].
    visible: bool, broadcasts against scores with the same rank.

  Returns:
    weights [..., S] and lse [...]; 0 and -inf where nothing is visible.
  """
  largest = jnp.max(
    jnp.where(visible, jax.lax.stop_gradient(scores), -jnp.inf),
    axis=-1,
    keepdims=True,
    initial=-jnp.inf,
  )
  largest = jnp.where(jnp.isneginf(largest), 0.0, largest)
  # Masked scores become `largest` before the exponential, not after: its
  # derivative must be finite there, because 0 * inf is NaN.
  shifted = jnp.where(visible, scores - largest, 0.0)
  exponential = jnp.where(visible, jnp.exp(shifted), 0.0)
  total = jnp.sum(exponential, axis=-1, keepdims=True)
  empty = total == 0.0
  total = jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
  return exponential / total, lse[..., 0]


def context_and_lse(request: Request) -> tuple[jax.Array, jax.Array]:
  """The context [..., T, E] and the log-sum-exp [..., T] of a request."""
  if request.combined is not None:
    return _part_of(request, *request.combined)
  visible, bias = _visible_and_bias(request)
  weights, lse, poisoned = _distribution(request, visible, bias)
  value = request.value
  if visible is not None:
    lse = jnp.where(poisoned, jnp.nan, lse)
    value, bad_value = without_bad_tokens(value)
    poisoned = poisoned | jnp.any(visible & bad_value[..., None, :], axis=-1)
  context = _weighted_sum(request, weights, value)
  lse = jnp.broadcast_to(lse, context.shape[:-1])
  if visible is not None:
    context = jnp.where(poisoned[..., None], jnp.nan, context)
  return context, lse


def _weighted_sum(request, weights, value):
  """The sum of values by weights, of which dropout takes some away."""
  if request.dropout is not None:
    shape = (*request.leading, *weights.shape[-2:])
    weights = weights * request.dropout.multiplier(shape, request.dtype)
  compute_dtype = jnp.result_type(request.query, value)
  return jnp.einsum(
    "...ts,...se->...te",
    weights.astype(compute_dtype),
    value.astype(compute_dtype),
    preferred_element_type=request.dtype,
  )


def _part_of(request, context, lse):
  """A whole's context and lse, with these keys' part of their derivatives.

  With these keys' weights P = exp(scores - lse), the lse held, the parts are
  d lse = d sum(P) and d context = d (P value) - d lse context.
  """
  hold = jax.lax.stop_gradient
  visible, bias = _visible_and_bias(request)
  scores, visible, bad = _scores(request, visible, bias)
  value = request.value if bad is None else without_bad_tokens(request.value)[0]
  # Where the lse is -inf nothing is visible.
  visible = visible & ~jnp.isneginf(lse)[..., None]
  logarithms = jnp.where(visible, scores - lse[..., None], 0.0)
  # Huge scores may round otherwise than they did for the lse.
  logarithms = logarithms - hold(jnp.maximum(logarithms, 0.0))
  weights = jnp.where(visible, jnp.exp(logarithms), 0.0)
  of_lse = jnp.sum(weights, axis=-1)
  of_context = (
    _weighted_sum(request, weights, value) - of_lse[..., None] * context
  )
  return context + of_context - hold(of_context), lse + of_lse - hold(of_lse)


def weights(request: Request) -> jax.Array:
  """The distribution over keys of each query, [..., T, S]."""
  visible, bias = _visible_and_bias(request)
  distribution, _, poisoned = _distribution(request, visible, bias)
  if visible is None:
    return distribution
  return jnp.where(poisoned[..., None], jnp.nan, distribution)


def _visible_and_bias(request):
  """Who sees whom, [..., T, S] or None for all, and the bias, finite."""
  rank = request.query.ndim
  rows, columns = map(positions, request.scores_shape[-2:])
  visible = bias = None
  if request.mask is not None:
    visible = axes.with_rank(request.mask.block(rows, columns, rank - 2), rank)
    visible = jnp.asarray(visible)
  if request.bias is not None:
    bias = axes.with_rank(request.bias.block(rows, columns, rank - 2), rank)
    allowed = ~jnp.isneginf(bias)
    bias = jnp.where(allowed, bias, 0.0).astype(request.dtype)
    visible = allowed if visible is None else visible & allowed
  return visible, bias


def _distribution(request, visible, bias):
  """Weights, lse, both finite, and bool [..., T]: which rows must be NaN."""
  scores, visible, bad = _scores(request, visible, bias)
  distribution, lse = masked_softmax(scores, visible)
  if bad is None:
    return distribution, lse, None
  # Callers make poisoned rows NaN at the very end, so that the derivatives of
  # the other rows never meet a NaN, not even multiplied by zero.
  return distribution, lse, jnp.any(visible & bad, axis=-1)


def _scores(request, visible, bias):
  """Finite scores, who sees whom, and which pairs have a bad token."""
  if visible is None:
    scores = request.score(request.query, request.key).astype(request.dtype)
    return scores, jnp.ones_like(scores, bool), None
  query, bad_query = without_bad_tokens(request.query)
  key, bad_key = without_bad_tokens(request.key)
  scores = request.score(query, key).astype(request.dtype)
  if bias is not None:
    scores = scores + bias
  visible = jnp.broadcast_to(
    visible, jnp.broadcast_shapes(visible.shape, scores.shape)
  )
  return scores, visible, bad_query[..., :, None] | bad_key[..., None, :]
