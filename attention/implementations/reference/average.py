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
from jax.custom_derivatives import SymbolicZero

from attention.arrays.matmul import matmul_precision, weighted_sum
from attention.arrays.softmax import Statistics
from attention.implementations.non_finite import finite
from attention.transforms.custom_transpose import (
  jvp_of_active,
  with_mutual_transpose,
)
from attention.transforms.tangent_rule import KeptJvp

_SMALLEST = 2.0**-60  # added to totals, which are 1 at least or 0


@functools.partial(KeptJvp, nondiff_argnums=(0, 1))
def average(dtype, precision, scores, visible, flags, multipliers, value):
  """The average of values by the softmax of visible scores.

  Args:
    dtype: that of the sums.
    precision: that of derivatives, which may be traced later.
    scores: [..., T, S]; -inf hides a pair, and hidden ones may be anything.
    visible: bool, broadcasts to the scores.
    flags: [..., S] of 0 and NaN, or None; rows that attend to a key of NaN are
      NaN.
    multipliers: arrays by which the weights are multiplied.
    value: [..., S, E].

  Returns:
    [..., T, E], zeros in rows without a visible key.
  """
  del precision
  exponentials, _, total = _exponentials(scores, visible)
  divisor = _divisor(exponentials, total, visible, flags)[..., None]
  weights = math.prod(multipliers, start=exponentials / divisor)
  return weighted_sum(weights, finite(value), dtype)


@functools.partial(average.defjvp, symbolic_zeros=True)
def _average_jvp(dtype, precision, primals, tangents):
  scores, visible, flags, multipliers, value = primals

  def differentiable(scores, value):
    weights = _finite_weights(scores, visible)
    weights = math.prod(multipliers, start=weights)
    return weighted_sum(weights, finite(value), dtype)

  with matmul_precision(precision):
    # With zeros as a tangent XLA's compiler for CPUs (jaxlib 0.10.2 to 0.12.0)
    # would have wrong results in bfloat16, see `tests/test_compiler.py`.
    active = [
      None if isinstance(each, SymbolicZero) else each
      for each in (tangents[0], tangents[-1])
    ]
    context, tangent = jvp_of_active(differentiable, (scores, value), active)
    # The cotangents of rows that are NaN may be NaN too.
    exponentials, _, total = _exponentials(
      jax.lax.stop_gradient(scores), visible
    )
    divisor = _divisor(exponentials, total, visible, flags)[..., None]
    context = jnp.where(divisor < jnp.inf, context, jnp.nan)
    tangent = jnp.where(divisor < jnp.inf, tangent, 0.0)
    return context, tangent


@KeptJvp
def statistics(scores, visible) -> Statistics:
  """The statistics of rows, whose exponentials XLA finds in `average`."""
  _, maximum, total = _exponentials(scores, visible)
  is_empty = total <= _SMALLEST
  return Statistics(maximum, jnp.where(is_empty, 0.0, total))


@statistics.defjvp
def _statistics_jvp(primals, tangents):
  rows = statistics(*primals)
  weights = _finite_weights(*primals)
  (of_lse,) = with_mutual_transpose(
    _of_rows, _of_pairs, [weights], [tangents[0]]
  )
  # Rows that are NaN have no derivatives.
  is_finite = rows.total < jnp.inf
  total = jnp.where(is_finite, rows.total, 0.0)
  of_total = jnp.where(is_finite, total * of_lse, 0.0)
  return rows, Statistics(jnp.zeros_like(total), of_total)


def _of_rows(residuals, tangents) -> list[jax.Array]:
  """The tangents of the lse, for those of scores."""
  return [_of_visible(*residuals, *tangents)[1]]


def _of_pairs(residuals, cotangents) -> list[jax.Array]:
  """The transpose of `_of_rows`."""
  (weights,), (cotangent,) = residuals, cotangents
  return [weights * cotangent[..., None]]


def _divisor(exponentials, total, visible, flags) -> jax.Array:
  """The totals of rows; NaN in rows that attend to a flagged key."""
  if flags is None:
    return total
  # XLA's compiler for TPUs takes an operation more for boolean flags.
  of_pairs = jnp.where(visible, flags[..., None, :], 0.0)
  return _at_least(_SMALLEST, jax.lax.add, exponentials + of_pairs)


@KeptJvp
def _finite_weights(scores, visible) -> jax.Array:
  """The softmax of rows; zeros if a row is NaN."""
  # XLA finds the exponentials and the total in those of `average`.
  exponentials, _, total = _exponentials(scores, visible)
  return _finite_ratio(exponentials, total)


@_finite_weights.defjvp
def _finite_weights_jvp(primals, tangents):
  weights = _finite_weights(*primals)
  # The derivatives of a softmax are a symmetric matrix.
  derivative = functools.partial(
    with_mutual_transpose, _derivative, _derivative
  )
  return weights, derivative([weights], [tangents[0]])[0]


def _finite_ratio(exponentials, total) -> jax.Array:
  """Exponentials divided by totals, 0 in rows whose total is NaN."""
  keys = exponentials.shape[-1]
  if isinstance(keys, int) and keys % 8:
    # For these lengths XLA's compiler for TPUs would copy all pairs if the
    # total decided for each: in bfloat16 the gradient would take twice as long.
    # XLA takes exp(NaN) >= 0 for true.
    exponentials = jnp.where(exponentials < 2.0, exponentials, 0.0)
    return exponentials / jnp.where(total < jnp.inf, total, jnp.inf)[..., None]
  divisor = total[..., None]
  return jnp.where(divisor < jnp.inf, exponentials / divisor, 0.0)


def _derivative(residuals, arguments) -> list[jax.Array]:
  """The tangents of weights for those of scores, or the transpose."""
  (weights,), (numbers,) = residuals, arguments
  numbers, mean = _of_visible(weights, numbers)
  return [weights * (numbers - mean[..., None])]


def _of_visible(weights, numbers):
  """Numbers, which are 0 for hidden pairs, and their sums by weights."""
  # Those of hidden pairs may be infinite.
  is_hidden = weights == 0.0
  numbers = jnp.where(is_hidden, 0.0, numbers)
  # Without the second `where`, XLA's compiler for CPUs (jaxlib 0.10.2) has
  # wrong results under `jax.vmap`: https://github.com/jax-ml/jax/issues/39103.
  products = jnp.where(is_hidden, 0.0, weights * numbers)
  return numbers, jnp.sum(products, axis=-1)


def _exponentials(scores, visible) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Exponentials of visible scores, 0 elsewhere, their maxima and totals."""
  logits = jnp.where(visible, scores, -jnp.inf)
  maximum = _at_least(np.finfo(scores.dtype).min, jax.lax.max, logits)
  exponentials = jnp.exp(_not_positive(logits - maximum[..., None]))
  # The total is a divisor, and must not be 0 in a row without a visible key.
  # Others are 1 at least but for rounding.
  return exponentials, maximum, _at_least(_SMALLEST, jax.lax.add, exponentials)


@KeptJvp
def _not_positive(exponents: jax.Array) -> jax.Array:
  """Exponents, none of which is positive, after another operation."""
  # With one operation less, XLA's compiler for TPUs computes float32 scores
  # again for the second product. The derivative is that of the exponents: where
  # scores tie for the maximum, that of the minimum would be a half.
  return jnp.minimum(exponents, 0.0)


@_not_positive.defjvp
def _not_positive_jvp(primals, tangents):
  return _not_positive(*primals), tangents[0]


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
