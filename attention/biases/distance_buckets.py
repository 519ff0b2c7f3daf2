"""T5's buckets of distances.

See "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
Transformer", Raffel et al., 2019, section 2.1
(https://arxiv.org/abs/1910.10683).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from attention.transforms.custom_transpose import with_mutual_transpose


def buckets(
  num_buckets: int, bidirectional: bool, max_distance: int
) -> np.ndarray:
  """The bucket of each j - i from -max_distance to max_distance."""
  relative = np.arange(-max_distance, max_distance + 1)
  if bidirectional:
    num_buckets //= 2
    first, distance = num_buckets * (relative > 0), np.abs(relative)
  else:
    first, distance = np.zeros_like(relative), np.maximum(-relative, 0)
  exact = num_buckets // 2
  ratio = np.log(np.maximum(distance, exact) / exact)
  ratio = ratio / math.log(max_distance / exact)
  # A distance on the edge of a bucket must not fall below it by rounding.
  coarse = exact + np.floor(ratio * (num_buckets - exact) + 1e-9).astype(int)
  coarse = np.minimum(coarse, num_buckets - 1)
  return first + np.where(distance < exact, distance, coarse)


def of_buckets(numbers: jax.Array, of_distances: np.ndarray) -> jax.Array:
  """The numbers of each distance, [H, 2m + 1], from those of buckets."""
  number = numbers.shape[-1]

  # The transpose of a look-up is a scatter, which GPUs compute in two kernels.
  def transpose(residuals, arguments):
    del residuals
    is_own = of_distances == np.arange(number)[:, None, None]
    return [jnp.sum(jnp.where(is_own, arguments[0][None], 0.0), axis=-1).T]

  def look_up(residuals, arguments):
    del residuals
    return [jnp.take(arguments[0].T, of_distances, axis=0).T]

  return with_mutual_transpose(look_up, transpose, [], [numbers])[0]
