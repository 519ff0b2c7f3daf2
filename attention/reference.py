"""The dense formula, the oracle of every test.

    scores  = score(query, key) + bias           where mask, else -inf
    lse     = logsumexp_j scores
    context = sum_j exp(scores - lse) * value

What no formula says, and all implementations keep: a row that may attend to
nothing has weights 0, context 0, lse -inf and zero derivatives of any order;
a key that is masked out changes nothing, NaN and inf included; a non-finite
token that a row does see makes that row NaN, and no other row.
"""

import jax
import jax.numpy as jnp

from attention import axes
from attention.biases.types import Bias
from attention.dropout import Dropout
from attention.masks.types import Mask
from attention.pairwise import positions
from attention.scores.protocol import Score


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


def context_and_lse(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  score: Score,
  mask: Mask | None,
  bias: Bias | None,
  dropout: Dropout | None,
) -> tuple[jax.Array, jax.Array]:
  """The context and the log-sum-exp; all arrays have the same rank.

  Args:
    query: [..., T, Dq].
    key: [..., S, Dk].
    value: [..., S, E].
    score: a bound score.
    mask: a mask or None.
    bias: a bias or None.
    dropout: dropout of the weights or None; it leaves the lse alone.

  Returns:
    context [..., T, E] and lse [..., T], both in the statistics' dtype.
  """
  dtype = _statistics_dtype(query, key, value)
  visible, bias_array = _visible_and_bias(query, key, mask, bias, dtype)
  weights, lse, poisoned = _distribution(
    query, key, score, visible, bias_array, dtype
  )
  if visible is not None:
    lse = jnp.where(poisoned, jnp.nan, lse)
    value, bad_value = without_bad_tokens(value)
    poisoned = poisoned | jnp.any(visible & bad_value[..., None, :], axis=-1)
  if dropout is not None:
    shape = jnp.broadcast_shapes(
      weights.shape, (*value.shape[:-2], *weights.shape[-2:])
    )
    weights = weights * dropout.multiplier(shape, dtype)
  compute_dtype = jnp.result_type(query, value)
  context = jnp.einsum(
    "...ts,...se->...te",
    weights.astype(compute_dtype),
    value.astype(compute_dtype),
    preferred_element_type=dtype,
  )
  lse = jnp.broadcast_to(lse, context.shape[:-1])
  if visible is not None:
    context = jnp.where(poisoned[..., None], jnp.nan, context)
  return context, lse


def weights(
  query: jax.Array,
  key: jax.Array,
  *,
  score: Score,
  mask: Mask | None,
  bias: Bias | None,
) -> jax.Array:
  """The distribution over keys of each query, [..., T, S]."""
  dtype = _statistics_dtype(query, key)
  visible, bias_array = _visible_and_bias(query, key, mask, bias, dtype)
  distribution, _, poisoned = _distribution(
    query, key, score, visible, bias_array, dtype
  )
  if visible is None:
    return distribution
  return jnp.where(poisoned[..., None], jnp.nan, distribution)


def _statistics_dtype(*arrays):
  return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def without_bad_tokens(tokens):
  """Tokens, zero where one holds NaN or inf, and [..., T] which did."""
  bad = ~jnp.all(jnp.isfinite(tokens), axis=-1)
  return jnp.where(bad[..., None], jnp.zeros_like(tokens), tokens), bad


def _visible_and_bias(query, key, mask, bias, dtype):
  """Who sees whom, [..., T, S] or None for all, and the bias, finite."""
  rank = query.ndim - 2
  rows, columns = positions(query.shape[-2]), positions(key.shape[-2])
  visible = bias_array = None
  if mask is not None:
    visible = axes.with_rank(mask.block(rows, columns, rank), query.ndim)
    visible = jnp.asarray(visible)
  if bias is not None:
    bias_array = axes.with_rank(bias.block(rows, columns, rank), query.ndim)
    allowed = ~jnp.isneginf(bias_array)
    bias_array = jnp.where(allowed, bias_array, 0.0).astype(dtype)
    visible = allowed if visible is None else visible & allowed
  return visible, bias_array


def _distribution(query, key, score, visible, bias_array, dtype):
  """Weights, lse, both finite, and bool [..., T]: which rows must be NaN."""
  if visible is None:
    scores = score(query, key).astype(dtype)
    return (*masked_softmax(scores, jnp.ones_like(scores, bool)), None)
  query, bad_query = without_bad_tokens(query)
  key, bad_key = without_bad_tokens(key)
  scores = score(query, key).astype(dtype)
  if bias_array is not None:
    scores = scores + bias_array
  visible = jnp.broadcast_to(
    visible, jnp.broadcast_shapes(visible.shape, scores.shape)
  )
  distribution, lse = masked_softmax(scores, visible)
  # Callers make poisoned rows NaN at the very end, so that the derivatives of
  # the other rows never meet a NaN, not even multiplied by zero.
  bad = bad_query[..., :, None] | bad_key[..., None, :]
  return distribution, lse, jnp.any(visible & bad, axis=-1)
