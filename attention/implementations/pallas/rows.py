"""The statistics of rows, as the kernels of gradients use them."""

import jax
import jax.numpy as jnp


def factors_of_rows(
  maximum: jax.Array, total: jax.Array, is_masked: bool
) -> tuple[jax.Array, jax.Array]:
  """M and r of the weights exp(score - m) r; r is 0 for a row without keys."""
  # With a mask it is also 0 for rows of NaN, which then have no derivatives.
  has_weights = total > 0.0 if is_masked else total != 0.0
  inverse = jnp.where(has_weights, 1.0 / total, 0.0)
  return jnp.where(has_weights, maximum, 0.0), inverse
