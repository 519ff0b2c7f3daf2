"""Projections of tokens to heads and of heads to tokens."""

from typing import Annotated as Shaped
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.checks import check_floating, check_integers, check_shape

__all__ = ["merge_heads", "split_heads"]


class Projection(NamedTuple):
  """The weight of a projection, and its bias or None."""

  weight: jax.Array
  bias: jax.Array | None = None


def project_heads(x, projection: Projection, name: str) -> jax.Array:
  """[..., T, D] to [..., H, T, E] for a weight [D, H, E] and a bias [H, E]."""
  weight, bias = projection
  weight_name = f"{name}_weight"
  check_shape(
    weight_name,
    weight,
    features=x.shape[-1],
    heads=None,
    head_size=None,
    fits=name,
  )
  heads = jnp.einsum("...td,dhe->...hte", x, weight)
  if bias is None:
    return heads
  count, size = weight.shape[-2:]
  check_floating(**{f"{name}_bias": bias})
  check_shape(
    f"{name}_bias", bias, heads=count, head_size=size, fits=weight_name
  )
  return jnp.add(*axes.aligned(heads, bias[:, None, :]))


def combine_heads(x, projection: Projection) -> jax.Array:
  """[..., H, T, E] to [..., T, D] for a weight [H, E, D] and a bias [D]."""
  weight, bias = projection
  count, _, size = x.shape[-3:]
  check_shape(
    "output_weight",
    weight,
    heads=count,
    head_size=size,
    features=None,
    fits="value's heads",
  )
  combined = jnp.einsum("...hte,heo->...to", x, weight)
  if bias is None:
    return combined
  features = weight.shape[-1]
  check_floating(output_bias=bias)
  check_shape("output_bias", bias, features=features, fits="output_weight")
  return jnp.add(*axes.aligned(combined, bias))


def split_heads(
  x: Shaped[jax.Array, "... T H*D"], num_heads: int
) -> Shaped[jax.Array, "... H T D"]:
  """Splits the features into heads: [..., T, H * D] to [..., H, T, D].

  Args:
    x: [..., T, H * D].
    num_heads: the number H of heads.

  Returns:
    [..., H, T, D].

  Raises:
    AssertionError: if `x` has fewer than two axes.
    TypeError: if `num_heads` is no integer.
    ValueError: if H does not divide the number of features.

  Example:
    >>> import jax.numpy as jnp
    >>> split_heads(jnp.ones((2, 5, 12)), 3).shape
    (2, 3, 5, 4)
  """
  check_shape("x", x, length=None, features=None)
  check_integers(num_heads=num_heads)
  features = x.shape[-1]
  if num_heads < 1 or features % num_heads:
    raise ValueError(
      f"x has {features} features, which num_heads={num_heads} must divide"
    )
  split = jnp.reshape(x, (*x.shape[:-1], num_heads, features // num_heads))
  return jnp.swapaxes(split, -2, -3)


def merge_heads(
  x: Shaped[jax.Array, "... H T D"],
) -> Shaped[jax.Array, "... T H*D"]:
  """Merges the heads, the inverse of `split_heads`.

  Args:
    x: [..., H, T, D].

  Returns:
    [..., T, H * D].

  Raises:
    AssertionError: if `x` has fewer than three axes.

  Example:
    >>> import jax.numpy as jnp
    >>> merge_heads(jnp.ones((2, 3, 5, 4))).shape
    (2, 5, 12)
  """
  check_shape("x", x, heads=None, length=None, features=None)
  swapped = jnp.swapaxes(x, -2, -3)
  *leading, count, size = swapped.shape
  return jnp.reshape(swapped, (*leading, count * size))
