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
from attention.request import Call, without_bad_tokens


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


def context_and_lse(call: Call) -> tuple[jax.Array, jax.Array]:
  """The context [..., T, E] and the log-sum-exp [..., T] of a call."""
  if call.whole is not None:
    return _part_of(call, *call.whole)
  visible, bias = _visible_and_bias(call)
  weights, lse, poisoned = _distribution(call, visible, bias)
  value = call.value
  if visible is not None:
    lse = jnp.where(poisoned, jnp.nan, lse)
    value, bad_value = without_bad_tokens(value)
    poisoned = poisoned | jnp.any(visible & bad_value[..., None, :], axis=-1)
  context = _weighted_sum(call, weights, value)
  lse = jnp.broadcast_to(lse, context.shape[:-1])
  if visible is not None:
    context = jnp.where(poisoned[..., None], jnp.nan, context)
  return context, lse


def _weighted_sum(call, weights, value):
  """The sum of values by weights, of which dropout takes some away."""
  if call.dropout is not None:
    shape = (*call.leading, *weights.shape[-2:])
    weights = weights * call.dropout.multiplier(shape, call.dtype)
  compute_dtype = jnp.result_type(call.query, value)
  return jnp.einsum(
    "...ts,...se->...te",
    weights.astype(compute_dtype),
    value.astype(compute_dtype),
    preferred_element_type=call.dtype,
  )


def _part_of(call, context, lse):
  """A whole's context and lse, with these keys' part of their derivatives.

  With these keys' weights P = exp(scores - lse), the lse held, the parts are
  d lse = d sum(P) and d context = d (P value) - d lse context.
  """
  hold = jax.lax.stop_gradient
  visible, bias = _visible_and_bias(call)
  scores, visible, bad = _scores(call, visible, bias)
  value = call.value if bad is None else without_bad_tokens(call.value)[0]
  # Where the lse is -inf nothing is visible.
  visible = visible & ~jnp.isneginf(lse)[..., None]
  logarithms = jnp.where(visible, scores - lse[..., None], 0.0)
  # Huge scores may round otherwise than they did for the lse.
  logarithms = logarithms - hold(jnp.maximum(logarithms, 0.0))
  weights = jnp.where(visible, jnp.exp(logarithms), 0.0)
  of_lse = jnp.sum(weights, axis=-1)
  of_context = _weighted_sum(call, weights, value) - of_lse[..., None] * context
  return context + of_context - hold(of_context), lse + of_lse - hold(of_lse)


def weights(call: Call) -> jax.Array:
  """The distribution over keys of each query, [..., T, S]."""
  visible, bias = _visible_and_bias(call)
  distribution, _, poisoned = _distribution(call, visible, bias)
  if visible is None:
    return distribution
  return jnp.where(poisoned[..., None], jnp.nan, distribution)


def _visible_and_bias(call):
  """Who sees whom, [..., T, S] or None for all, and the bias, finite."""
  rank = call.query.ndim
  rows, columns = map(positions, call.scores_shape[-2:])
  visible = bias = None
  if call.mask is not None:
    visible = axes.with_rank(call.mask.block(rows, columns, rank - 2), rank)
    visible = jnp.asarray(visible)
  if call.bias is not None:
    bias = axes.with_rank(call.bias.block(rows, columns, rank - 2), rank)
    allowed = ~jnp.isneginf(bias)
    bias = jnp.where(allowed, bias, 0.0).astype(call.dtype)
    visible = allowed if visible is None else visible & allowed
  return visible, bias


def _distribution(call, visible, bias):
  """Weights, lse, both finite, and bool [..., T]: which rows must be NaN."""
  scores, visible, bad = _scores(call, visible, bias)
  distribution, lse = masked_softmax(scores, visible)
  if bad is None:
    return distribution, lse, None
  # Callers make poisoned rows NaN at the very end, so that the derivatives of
  # the other rows never meet a NaN, not even multiplied by zero.
  return distribution, lse, jnp.any(visible & bad, axis=-1)


def _scores(call, visible, bias):
  """Finite scores, who sees whom, and which pairs have a bad token."""
  if visible is None:
    scores = call.score(call.query, call.key).astype(call.dtype)
    return scores, jnp.ones_like(scores, bool), None
  query, bad_query = without_bad_tokens(call.query)
  key, bad_key = without_bad_tokens(call.key)
  scores = call.score(query, key).astype(call.dtype)
  if bias is not None:
    scores = scores + bias
  visible = jnp.broadcast_to(
    visible, jnp.broadcast_shapes(visible.shape, scores.shape)
  )
  return scores, visible, bad_query[..., :, None] | bad_key[..., None, :]
