"""Encodings of positions in tokens: sinusoidal and rotary."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.checks import check_tokens

__all__ = ["rotary", "sinusoidal"]


def _check_even(name: str, size: int) -> None:
  if size % 2:
    raise ValueError(
      f"{name} must be even, got {size}: sines and cosines alternate"
    )


def sinusoidal(length: int, features: int) -> jax.Array:
  """A table of sines and cosines to add to embeddings.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.5
  (https://arxiv.org/abs/1706.03762).

  Args:
    length: T, the number of positions.
    features: D, even.

  Returns:
    [T, D], sines in the even columns and cosines in the odd ones.

  Raises:
    ValueError: if `features` is odd.

  Example:
    >>> sinusoidal(2, 2).round(3)
    Array([[0.   , 1.   ],
           [0.841, 0.540...]], dtype=float32)
  """
  _check_even("features", features)
  # float64, as float32 angles at large positions have inaccurate sines.
  frequencies = 10000.0 ** (-np.arange(0, features, 2) / max(features, 1))
  angles = np.arange(length)[:, None] * frequencies
  table = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
  return jnp.asarray(table.reshape(length, features))


def rotary(
  x: jax.Array, positions: jax.Array | None = None, base: float = 10000.0
) -> jax.Array:
  """Rotates pairs of features by angles proportional to the position.

  The dot product of two rotated tokens depends only on their distance. See
  "RoFormer", Su et al., 2021, equation 34 (https://arxiv.org/abs/2104.09864);
  features 2m and 2m + 1 make a pair, as in the paper.

  Args:
    x: [..., T, D] queries or keys, D even.
    positions: [..., T], broadcasts to x without its features; None means 0 to
      T - 1.
    base: the longest wavelength is about 2 pi times `base`.

  Returns:
    [..., T, D] in the dtype of x.

  Raises:
    AssertionError: if `x` or `positions` have a wrong shape or dtype.
    ValueError: if D is odd.

  Example:
    >>> import jax.numpy as jnp
    >>> rotary(jnp.array([[1.0, 0.0], [1.0, 0.0]])).round(3)
    Array([[1.   , 0.   ],
           [0.540..., 0.841]], dtype=float32)
  """
  check_tokens(x=x)
  x = jnp.asarray(x)
  _check_even("the number of features of x", x.shape[-1])
  if positions is None:
    positions = jnp.arange(x.shape[-2])
  positions = axes.with_rank(jnp.asarray(positions), x.ndim - 1)
  chex.assert_is_broadcastable(
    positions.shape,
    x.shape[:-1],
    custom_message="positions must broadcast to x without its features",
  )
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  exponent = np.arange(0, x.shape[-1], 2) / max(x.shape[-1], 1)
  frequencies = axes.with_rank(jnp.asarray(base**-exponent, dtype), x.ndim)
  angles = positions[..., None].astype(dtype) * frequencies
  cosine, sine = jnp.cos(angles), jnp.sin(angles)
  pairs = jnp.reshape(x.astype(dtype), (*x.shape[:-1], -1, 2))
  even, odd = pairs[..., 0], pairs[..., 1]
  rotated = jnp.stack(
    [even * cosine - odd * sine, even * sine + odd * cosine], axis=-1
  )
  return jnp.reshape(rotated, x.shape).astype(x.dtype)
