"""The dense formula of masked dot products, through which NaN spreads.

The scores of hidden tokens are replaced, so that NaN there changes nothing. NaN
in a visible query or key spreads through the scores, the softmax and the
context. A key that is infinite, or whose value is not finite, becomes NaN where
the product reads it. No pass over the tokens or the pairs searches for NaN.

Derivatives are those at finite tokens, and rows that are NaN have none.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.custom_transpose import with_own_derivatives
from attention.implementations.dot_products import constant_factor, dot_product
from attention.implementations.non_finite import mapped, where_finite
from attention.implementations.reference.pairs import (
  multiplier,
  visible_and_bias,
)
from attention.matmul import inner_products, matmul_precision, weighted_sum
from attention.normalizers import is_softmax
from attention.request import Request
from attention.scores.classical import is_half


def serves(request: Request) -> bool:
  """Whether the request is one of masked dot products, without statistics."""
  score = dot_product(request.score)
  factor = score and constant_factor(request.score, request.query)
  return (
    request.is_masked
    and is_softmax(request.normalizer)
    and request.combined is None
    # The lse of a row with a NaN value is finite.
    and not request.return_lse
    # Other leading axes of values would be axes of the scores.
    and request.leading == request.scores_shape[:-2]
    and score is not None
    and score.is_finite
    and request.key.shape[-1] > 0
    and (factor is not None or not is_half(request.query))
  )


def context(request: Request) -> jax.Array:
  """The context [..., T, E]; rows that attend to NaN or infinity are NaN."""
  score, precision = request.score, request.precision
  query = mapped(score.map_query, request.query, is_masked=True)
  key = mapped(score.map_key, request.key, is_masked=True)
  value = request.value.astype(jnp.result_type(request.query, request.value))
  factor = constant_factor(score, query) if is_half(query) else 1.0
  assert factor is not None
  visible, bias = visible_and_bias(request)
  multipliers = multiplier(request)

  def compute(query, key, visible, bias, multipliers, value):
    products = _products(precision, query, key, value).astype(request.dtype)
    scores = sum(bias, products * factor)
    values = scores, visible, multipliers, value
    return _average(request.dtype, precision, *values)

  arrays = query, key, visible, bias, multipliers
  leaves, structure = jax.tree.flatten(arrays)
  *residuals, argument = axes.varying_alike([*leaves, value])

  def function(residuals, arguments):
    return [compute(*jax.tree.unflatten(structure, residuals), *arguments)]

  def transpose(residuals, cotangents):
    # `jax.linear_transpose` assumes that all values are finite.
    zeros = jnp.zeros(value.shape, value.dtype)
    of_value = functools.partial(
      compute, *jax.tree.unflatten(structure, residuals)
    )
    return [*jax.vjp(of_value, zeros)[1](*cotangents)]

  return with_own_derivatives(function, transpose, residuals, [argument])[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _products(precision, query, key, value) -> jax.Array:
  """The products of queries and keys, NaN where a token is not finite."""
  # XLA joins the `where` with the product. Only keys and values of different
  # numbers of features need a pass for flags. All products of a query that is
  # not finite are NaN or infinite, so that its softmax is NaN.
  del precision
  is_bad = ~jnp.isfinite(value)
  if value.shape[-1] != key.shape[-1]:
    is_bad = jnp.any(is_bad, axis=-1, keepdims=True)
  key = jnp.where(is_bad | ~jnp.isfinite(key), jnp.nan, key)
  return inner_products(query, key)


@_products.defjvp
def _products_jvp(precision, primals, tangents):
  def differentiable(query, key):
    return inner_products(_finite(query), _finite(key))

  with matmul_precision(precision):
    tangent = jax.jvp(differentiable, primals[:2], tangents[:2])[1]
    return _products(precision, *primals), tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _average(
  dtype, precision, scores, visible, multipliers, value
) -> jax.Array:
  """The average of values by the softmax of visible scores."""
  del precision
  exponentials, total = _exponentials(scores, visible)
  weights = exponentials / total[..., None]
  weights = math.prod(multipliers, start=weights)
  return weighted_sum(weights, _finite(value), dtype)


@_average.defjvp
def _average_jvp(dtype, precision, primals, tangents):
  scores, visible, multipliers, value = primals

  def differentiable(scores, value):
    weights = _finite_weights(scores, visible)
    weights = math.prod(multipliers, start=weights)
    return weighted_sum(weights, _finite(value), dtype)

  with matmul_precision(precision):
    moved = tangents[0], tangents[-1]
    tangent = jax.jvp(differentiable, (scores, value), moved)[1]
    # The cotangents of rows that are NaN may be NaN too.
    _, total = _exponentials(jax.lax.stop_gradient(scores), visible)
    tangent = jnp.where(total[..., None] < jnp.inf, tangent, 0.0)
    return _average(dtype, precision, *primals), tangent


@jax.custom_jvp
def _finite_weights(scores, visible) -> jax.Array:
  """The softmax of rows; zeros if a row is NaN."""
  # XLA finds the exponentials and the total in those of `_average`.
  exponentials, total = _exponentials(scores, visible)
  total = total[..., None]
  return jnp.where(total < jnp.inf, exponentials / total, 0.0)


@_finite_weights.defjvp
def _finite_weights_jvp(primals, tangents):
  weights = _finite_weights(*primals)
  terms = weights * tangents[0]
  return weights, terms - weights * jnp.sum(terms, axis=-1, keepdims=True)


def _exponentials(scores, visible) -> tuple[jax.Array, jax.Array]:
  """Exponentials of visible scores, 0 elsewhere, and their totals."""
  # XLA needs fewer passes over the pairs for finite logits and zeros instead of
  # exponentials than for logits of -inf: on TPUs half the time.
  lowest = jnp.finfo(scores.dtype).min
  logits = jnp.where(visible, scores, lowest)
  initial = lowest if scores.shape[-1] == 0 else None
  maximum = jnp.max(logits, axis=-1, keepdims=True, initial=initial)
  exponentials = jnp.where(visible, jnp.exp(logits - maximum), 0.0)
  # The total is a divisor: not zero in a row without a visible key. Others are
  # 1 at least but for rounding.
  least = np.asarray(2.0**-60, exponentials.dtype)
  return exponentials, jax.lax.reduce(
    exponentials, least, jax.lax.add, (exponentials.ndim - 1,)
  )


def _finite(tokens: Any) -> jax.Array:
  """Zeros for NaN and infinity; cotangents there are zero already."""
  return where_finite(jnp.isfinite(tokens), tokens, keeps_cotangents=True)
