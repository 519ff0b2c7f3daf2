"""Averages of values by the softmax of scores that may be NaN.

NaN in a visible score spreads: the row is NaN. Derivatives are those of finite
values, and rows that are NaN have none.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention.custom_transpose import with_mutual_transpose
from attention.implementations.non_finite import finite
from attention.matmul import matmul_precision, weighted_sum


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def average(dtype, precision, scores, visible, multipliers, value) -> jax.Array:
  """The average of values by the softmax of visible scores.

  Args:
    dtype: that of the sums.
    precision: that of derivatives, which may be traced later.
    scores: [..., T, S]; -inf hides a pair, and hidden ones may be anything.
    visible: bool, broadcasts to the scores.
    multipliers: arrays by which the weights are multiplied.
    value: [..., S, E].

  Returns:
    [..., T, E], zeros in rows without a visible key.
  """
  del precision
  exponentials, total = _exponentials(scores, visible)
  weights = exponentials / total[..., None]
  weights = math.prod(multipliers, start=weights)
  return weighted_sum(weights, finite(value), dtype)


@average.defjvp
def _average_jvp(dtype, precision, primals, tangents):
  scores, visible, multipliers, value = primals

  def differentiable(scores, value):
    weights = _finite_weights(scores, visible)
    weights = math.prod(multipliers, start=weights)
    return weighted_sum(weights, finite(value), dtype)

  with matmul_precision(precision):
    moved = tangents[0], tangents[-1]
    tangent = jax.jvp(differentiable, (scores, value), moved)[1]
    # The cotangents of rows that are NaN may be NaN too.
    _, total = _exponentials(jax.lax.stop_gradient(scores), visible)
    tangent = jnp.where(total[..., None] < jnp.inf, tangent, 0.0)
    return average(dtype, precision, *primals), tangent


@jax.custom_jvp
def _finite_weights(scores, visible) -> jax.Array:
  """The softmax of rows; zeros if a row is NaN."""
  # XLA finds the exponentials and the total in those of `average`.
  exponentials, total = _exponentials(scores, visible)
  total = total[..., None]
  return jnp.where(total < jnp.inf, exponentials / total, 0.0)


@_finite_weights.defjvp
def _finite_weights_jvp(primals, tangents):
  weights = _finite_weights(*primals)
  # The derivatives of a softmax are a symmetric matrix.
  derivative = functools.partial(
    with_mutual_transpose, _derivative, _derivative
  )
  return weights, derivative([weights], [tangents[0]])[0]


def _derivative(residuals, arguments) -> list[jax.Array]:
  """The tangents of weights for those of scores, or the transpose."""
  (weights,), (numbers,) = residuals, arguments
  # Those of hidden pairs may be infinite.
  is_hidden = weights == 0.0
  numbers = jnp.where(is_hidden, 0.0, numbers)
  # Without the second `where`, XLA's compiler for CPUs (jaxlib 0.10.2) has
  # wrong results under `jax.vmap`: https://github.com/jax-ml/jax/issues/39103.
  products = jnp.where(is_hidden, 0.0, weights * numbers)
  return [weights * (numbers - jnp.sum(products, axis=-1, keepdims=True))]


def _exponentials(scores, visible) -> tuple[jax.Array, jax.Array]:
  """Exponentials of visible scores, 0 elsewhere, and their totals."""
  logits = jnp.where(visible, scores, -jnp.inf)
  maximum = _at_least(np.finfo(scores.dtype).min, jax.lax.max, logits)
  # The minimum changes no number. With one operation less, XLA's compiler for
  # TPUs computes float32 scores again for the second product.
  exponentials = jnp.exp(jnp.minimum(logits - maximum[..., None], 0.0))
  # The total is a divisor, and must not be 0 in a row without a visible key.
  # Others are 1 at least but for rounding.
  return exponentials, _at_least(2.0**-60, jax.lax.add, exponentials)


def _at_least(lowest: float, function: Callable, array: jax.Array) -> jax.Array:
  """The maximum or the sum of each row, with one more number, the lowest."""
  start = np.asarray(lowest, array.dtype)
  identity = np.asarray(
    0.0 if function is jax.lax.add else -np.inf, start.dtype
  )

  def reduced(array, start):
    return jax.lax.reduce(array, start, function, (array.ndim - 1,))

  def bounded(array):
    return function(reduced(array, identity), start)

  keys = array.shape[-1]
  if not isinstance(keys, int) or keys == 1:  # XLA reads no start for one key
    return bounded(array)
  # After an operation on the result, XLA's compiler for TPUs does not join the
  # softmax with the products.
  return jax.lax.platform_dependent(
    array, tpu=lambda array: reduced(array, start), default=bounded
  )
