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
from attention.softmax import Statistics

_SMALLEST = 2.0**-60  # added to totals, which are 1 at least or 0


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def average(dtype, precision, scores, visible, marks, multipliers, value):
  """The average of values by the softmax of visible scores.

  Args:
    dtype: that of the sums.
    precision: that of derivatives, which may be traced later.
    scores: [..., T, S]; -inf hides a pair, and hidden ones may be anything.
    visible: bool, broadcasts to the scores.
    marks: arrays [..., S] of 0 and NaN; rows that attend to a key of NaN are
      NaN.
    multipliers: arrays by which the weights are multiplied.
    value: [..., S, E].

  Returns:
    The average [..., T, E], zeros in rows without a visible key, and the
    `Statistics` [..., T] of the scores, which do not depend on the marks.
  """
  del precision
  exponentials, maximum, total = _exponentials(scores, visible)
  divisor = _divisor(exponentials, total, visible, marks)[..., None]
  weights = math.prod(multipliers, start=exponentials / divisor)
  context = weighted_sum(weights, finite(value), dtype)
  is_empty = total <= _SMALLEST
  return context, Statistics(maximum, jnp.where(is_empty, 0.0, total))


@average.defjvp
def _average_jvp(dtype, precision, primals, tangents):
  scores, visible, marks, multipliers, value = primals

  def differentiable(scores, value):
    weights, lse = _finite_weights(scores, visible)
    weights = math.prod(multipliers, start=weights)
    return weighted_sum(weights, finite(value), dtype), lse

  with matmul_precision(precision):
    moved = tangents[0], tangents[-1]
    results = jax.jvp(differentiable, (scores, value), moved)
    (context, _), (of_context, of_lse) = results
    # The cotangents of rows that are NaN may be NaN too.
    exponentials, _, total = _exponentials(
      jax.lax.stop_gradient(scores), visible
    )
    divisor = _divisor(exponentials, total, visible, marks)[..., None]
    context = jnp.where(divisor < jnp.inf, context, jnp.nan)
    of_context = jnp.where(divisor < jnp.inf, of_context, 0.0)
    _, statistics = average(dtype, precision, *primals)
    return (context, statistics), (of_context, _of_rows(statistics, of_lse))


def _of_rows(statistics: Statistics, of_lse: jax.Array) -> Statistics:
  """The tangents of statistics; zeros in rows that are NaN."""
  is_finite = statistics.total < jnp.inf
  total = jnp.where(is_finite, statistics.total, 0.0)
  of_total = jnp.where(is_finite, total * of_lse, 0.0)
  return Statistics(jnp.zeros_like(total), of_total)


def _divisor(exponentials, total, visible, marks) -> jax.Array:
  """The totals of rows; NaN in rows that attend to a marked key."""
  for each in marks:
    # XLA's compiler for TPUs takes an operation more for boolean marks.
    marked = exponentials + jnp.where(visible, each[..., None, :], 0.0)
    total = _at_least(_SMALLEST, jax.lax.add, marked)
  return total


@jax.custom_jvp
def _finite_weights(scores, visible) -> tuple[jax.Array, jax.Array]:
  """The softmax of rows, and zeros whose tangents are those of the lse.

  A row that is NaN has weights of 0.
  """
  # XLA finds the exponentials and the total in those of `average`.
  exponentials, _, total = _exponentials(scores, visible)
  return _finite_ratio(exponentials, total), jnp.zeros_like(total)


@_finite_weights.defjvp
def _finite_weights_jvp(primals, tangents):
  weights, zeros = _finite_weights(*primals)
  derivatives = functools.partial(with_mutual_transpose, _tangents, _cotangent)
  return (weights, zeros), tuple(derivatives([weights], [tangents[0]]))


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


def _tangents(residuals, arguments) -> list[jax.Array]:
  """The tangents of weights and of the lse, for those of scores."""
  (weights,), (numbers,) = residuals, arguments
  numbers, of_lse = _of_visible(weights, numbers)
  return [weights * (numbers - of_lse[..., None]), of_lse]


def _cotangent(residuals, arguments) -> list[jax.Array]:
  """The transpose of `_tangents`."""
  (weights,), (numbers, of_lse) = residuals, arguments
  numbers, mean = _of_visible(weights, numbers)
  return [weights * (numbers - mean[..., None] + of_lse[..., None])]


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
  # The minimum changes no number. With one operation less, XLA's compiler for
  # TPUs computes float32 scores again for the second product.
  exponentials = jnp.exp(jnp.minimum(logits - maximum[..., None], 0.0))
  # The total is a divisor, and must not be 0 in a row without a visible key.
  # Others are 1 at least but for rounding.
  return exponentials, maximum, _at_least(_SMALLEST, jax.lax.add, exponentials)


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
