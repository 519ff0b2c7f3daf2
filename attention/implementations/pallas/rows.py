"""The statistics of rows, as the kernels of gradients use them."""

import jax
import jax.numpy as jnp


def factors_of_rows(
  maximum: jax.Array, total: jax.Array, is_masked: bool
) -> tuple[jax.Array, jax.Array]:
  """The maxima m and factors r of the weights exp(score - m) r of rows."""
  # A row without keys has the factor 0. With a mask a row of NaN has it too, as
  # it then has no derivatives.
  has_weights = total > 0.0 if is_masked else total != 0.0
  inverse = jnp.where(has_weights, 1.0 / total, 0.0)
  return jnp.where(has_weights, maximum, 0.0), inverse
