"""Matrix products of kernels: rounded factors, and sums in float32 at least."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def kernel_precision(precision: Any) -> jax.lax.Precision:
  """One pass of bfloat16 or float32, which are what kernels have."""
  parts = precision if isinstance(precision, tuple) else (precision,)
  names = {getattr(each, "name", str(each)).lower() for each in parts}
  single = {"none", "default", "bfloat16", "bf16_bf16_f32"}
  if names <= single:
    return jax.lax.Precision.DEFAULT
  return jax.lax.Precision.HIGHEST


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5))
def matrix_product(left, right, axes, dtypes, precision, is_interpreted):
  """The product of two matrices along one axis of each.

  Args:
    left: a matrix.
    right: a matrix.
    axes: the axis of each that is summed over.
    dtypes: those to which the factors are rounded.
    precision: DEFAULT or HIGHEST.
    is_interpreted: whether XLA's CPU backend computes it.
  """
  # The factors are rounded to `dtypes` and their gradients are not.
  rounded = _wide_rounded if is_interpreted else jnp.asarray
  left, right = map(rounded, (left, right), dtypes)
  if left.dtype.itemsize == 2:
    precision = jax.lax.Precision.DEFAULT
  return jax.lax.dot_general(
    left,
    right,
    (((axes[0],), (axes[1],)), ((), ())),
    precision=precision,
    preferred_element_type=wide(jnp.result_type(left, right)),
  )


def _product_forward(left, right, *constants):
  return matrix_product(left, right, *constants), (left, right)


def _product_backward(axes, dtypes, *rest):
  *constants, (left, right), cotangent = rest
  # A factor's gradient is the product of the cotangent and the other factor,
  # in the order of the factor's axes.
  of_left = (cotangent, right, (1, 1 - axes[1])), (dtypes[1],) * 2
  of_right = (cotangent, left, (0, 1 - axes[0])), (dtypes[0],) * 2
  if axes[0] == 0:
    of_left = (right, cotangent, (1 - axes[1], 1)), of_left[1]
  if axes[1] == 0:
    of_right = (left, cotangent, (1 - axes[0], 0)), of_right[1]
  return tuple(
    matrix_product(*arguments, types, *constants)
    for arguments, types in (of_left, of_right)
  )


matrix_product.defvjp(_product_forward, _product_backward)


def _wide_rounded(value, dtype) -> jax.Array:
  """Numbers that are rounded to a dtype, in float32 at least."""
  # XLA's CPU backend lacks some products of bfloat16 (jaxlib 0.10.2).
  if wide(dtype) == dtype:
    return value.astype(dtype)
  info = jnp.finfo(dtype)
  value = value.astype(wide(dtype))
  return jax.lax.reduce_precision(value, info.nexp, info.nmant)


def wide(dtype) -> Any:
  """Float32 for floating-point numbers of fewer bits."""
  if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
    return jnp.dtype(jnp.float32)
  return dtype
