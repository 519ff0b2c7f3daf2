"""The statistics of rows, as the kernels of gradients use them."""

from typing import Any

import jax
import jax.numpy as jnp

from attention.softmax import Statistics


def factors_of_rows(
  maximum: jax.Array, total: jax.Array, is_masked: bool
) -> tuple[jax.Array, jax.Array]:
  """The maxima m and factors r of the weights exp(score - m) r of rows."""
  # A row without keys has the factor 0. With a mask a row of NaN has it too, as
  # it then has no derivatives.
  has_weights = total > 0.0 if is_masked else total != 0.0
  inverse = jnp.where(has_weights, 1.0 / total, 0.0)
  return jnp.where(has_weights, maximum, 0.0), inverse


def rows_of_gradients(
  context: jax.Array,
  statistics: Statistics,
  of_context: jax.Array,
  of_total: jax.Array | None,
  *,
  dtype: Any,
  is_masked: bool,
) -> dict[str, jax.Array]:
  """The numbers of rows, and the cotangents of contexts, by name."""
  # The mean of the weights' cotangents of a row is that of its context.
  products = of_context.astype(dtype) * context.astype(dtype)
  of_totals = 0.0 if of_total is None else of_total * statistics.total
  if is_masked:  # what is NaN has no derivatives
    is_nan = jnp.isnan(context)
    of_context = jnp.where(is_nan, jnp.zeros_like(of_context), of_context)
    products = jnp.where(is_nan, 0.0, products)
    of_totals = jnp.where(jnp.isnan(statistics.total), 0.0, of_totals)
  return {
    "maximum": statistics.maximum,
    "total": statistics.total,
    "mean": jnp.sum(products, axis=-1) - of_totals,
    "cotangent": of_context,
  }
