"""Heads: splitting features into them, projecting to them and back."""

import jax
import jax.numpy as jnp

from attention import axes
from attention.checks import check_axis, check_rank


def split_heads(x: jax.Array, num_heads: int) -> jax.Array:
  """[..., T, H * D] to [..., H, T, D].

  Args:
    x: [..., T, H * D].
    num_heads: H.

  Returns:
    [..., H, T, D].

  Raises:
    AssertionError: if `x` has no [T, features] axes.
    ValueError: if the features do not divide into heads.

  Example:
    >>> import jax.numpy as jnp
    >>> split_heads(jnp.ones((2, 5, 12)), 3).shape
    (2, 3, 5, 4)
  """
  check_rank(x, "x", "length, features")
  features = x.shape[-1]
  if num_heads < 1 or features % num_heads:
    raise ValueError(
      f"x has {features} features, which do not divide into "
      f"num_heads={num_heads} heads"
    )
  split = jnp.reshape(x, (*x.shape[:-1], num_heads, features // num_heads))
  return jnp.swapaxes(split, -2, -3)


def merge_heads(x: jax.Array) -> jax.Array:
  """[..., H, T, D] to [..., T, H * D], the inverse of `split_heads`.

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
  check_rank(x, "x", "heads, length, features")
  swapped = jnp.swapaxes(x, -2, -3)
  return jnp.reshape(swapped, (*swapped.shape[:-2], -1))


def project_heads(
  x: jax.Array,
  weight: jax.Array,
  bias: jax.Array | None = None,
  *,
  name: str = "weight",
) -> jax.Array:
  """Tokens [..., T, D] and a weight [D, H, E] to heads [..., H, T, E].

  Args:
    x: [..., T, D].
    weight: [D, H, E].
    bias: [H, E] or None.
    name: the weight's name in messages.

  Returns:
    [..., H, T, E].

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.

  Example:
    >>> import jax.numpy as jnp
    >>> project_heads(jnp.ones((5, 6)), jnp.ones((6, 2, 3))).shape
    (2, 5, 3)
  """
  check_rank(weight, name, "features, heads, head_size")
  check_axis(weight, name, -3, x.shape[-1], "the input's number of features")
  heads = jnp.einsum("...td,dhe->...hte", x, weight)
  if bias is None:
    return heads
  bias_name, shape = name.replace("weight", "bias"), jnp.shape(weight)
  check_rank(bias, bias_name, "heads, head_size")
  check_axis(bias, bias_name, -2, shape[-2], f"{name}'s number of heads")
  check_axis(bias, bias_name, -1, shape[-1], f"{name}'s head size")
  return jnp.add(*axes.aligned(heads, bias[:, None, :]))


def combine_heads(
  x: jax.Array, weight: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
  """Heads [..., H, T, E] and a weight [H, E, D] to tokens [..., T, D].

  Args:
    x: [..., H, T, E].
    weight: [H, E, D].
    bias: [D] or None.

  Returns:
    [..., T, D].

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.

  Example:
    >>> import jax.numpy as jnp
    >>> combine_heads(jnp.ones((2, 5, 3)), jnp.ones((2, 3, 6))).shape
    (5, 6)
  """
  check_rank(weight, "output_weight", "heads, head_size, features")
  check_axis(weight, "output_weight", -3, x.shape[-3], "the number of heads")
  check_axis(weight, "output_weight", -2, x.shape[-1], "value's head size")
  combined = jnp.einsum("...hte,heo->...to", x, weight)
  if bias is None:
    return combined
  size = jnp.shape(weight)[-1]
  check_rank(bias, "output_bias", "features")
  check_axis(bias, "output_bias", -1, size, "output_weight's features")
  return jnp.add(*axes.aligned(combined, bias))
