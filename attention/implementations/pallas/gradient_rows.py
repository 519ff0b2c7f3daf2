"""Numbers of rows that the kernels of gradients need."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# The maximum of rows without weights. Their terms must be finite, as infinity
# times 0 is NaN: exp(score - maximum) is 0.
_ABOVE_ALL_SCORES = 1e30


class GradientRows(NamedTuple):
  """Numbers of rows, [t] or [t, 1].

  Weights are exp(score - maximum) * inverse.
  """

  maximum: jax.Array
  inverse: jax.Array
  mean: jax.Array  # of the cotangents of a row's weights
  has_nan: jax.Array | None  # 1 if the context has NaN, else 0; with a mask


def gradient_rows(
  maximum: jax.Array,
  total: jax.Array,
  context: jax.Array,
  cotangent: jax.Array,
  *,
  of_total: Any,
  is_masked: bool,
) -> GradientRows:
  """The numbers of rows, from statistics, contexts [t, E] and cotangents.

  The cotangent of the total is None if it is zero.
  """
  # A row without keys has the factor 0. With a mask a row of NaN has it too.
  has_weights = total > 0.0 if is_masked else total != 0.0
  keepdims = total.ndim == context.ndim
  is_nan = jnp.isnan(context)
  products, has_nan = context * cotangent, None
  if is_masked:  # what is NaN has no derivatives
    products = jnp.where(is_nan, 0.0, products)
    flags = jnp.where(is_nan, 1.0, 0.0).astype(context.dtype)
    has_nan = jnp.max(flags, axis=-1, keepdims=keepdims)
  mean = jnp.sum(products, axis=-1, keepdims=keepdims)
  if of_total is not None:
    of_total = of_total * total
    if is_masked:
      of_total = jnp.where(jnp.isnan(total), 0.0, of_total)
    mean = mean - of_total
  return GradientRows(
    jnp.where(has_weights, maximum, _ABOVE_ALL_SCORES),
    jnp.where(has_weights, 1.0 / total, 0.0),
    mean,
    has_nan,
  )
