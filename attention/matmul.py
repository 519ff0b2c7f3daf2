"""Matrix products of tiles whose transposes are fast too; their precision."""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

# What `jax.default_matmul_precision` accepts.
_NAMES = (
  *("default", "high", "highest", "bfloat16", "tensorfloat32", "float32"),
  *(each.name for each in jax.lax.DotAlgorithmPreset if each.name != "DEFAULT"),
)


def precision_name(precision: Any) -> str | None:
  """The name of a `precision` argument; None is JAX's default where it is used.

  A rule of derivatives may be traced after the call that defines it. It keeps
  this name.
  """
  match precision:
    case None:
      return jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    case jax.lax.Precision():
      return precision.name.lower()
    case jax.lax.DotAlgorithmPreset() if precision.name in _NAMES:
      return precision.name
    case str() if precision in _NAMES:
      return precision
    case (left, right) if left == right:
      return precision_name(left)
  raise ValueError(
    "precision must be None, a jax.lax.Precision, a jax.lax.DotAlgorithmPreset "
    f"or a name of one, the same for both operands, got {precision!r}"
  )


def matmul_precision(precision: Any) -> contextlib.AbstractContextManager:
  """The precision of all products traced in it that do not ask for another."""
  return jax.default_matmul_precision(precision_name(precision))


def inner_products(query: jax.Array, key: jax.Array) -> jax.Array:
  """Query [..., t, D] times key [..., s, D], in float32 at least."""
  return _inner_products(precision_name(None), query, key)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _inner_products(precision, query, key):
  del precision
  algorithm = _bfloat16(query, key)
  return _product("...td,...sd->...ts", query, key, precision=algorithm)


@functools.partial(_inner_products.defjvp, symbolic_zeros=True)
def _inner_products_jvp(precision, primals, tangents):
  with matmul_precision(precision):
    return _inner_products_tangent(*primals, *tangents)


def _inner_products_tangent(query, key, query_tangent, key_tangent):
  """The products and their tangents."""
  algorithm, terms = _bfloat16(query, key), []
  if not isinstance(query_tangent, SymbolicZero):
    terms.append(
      _product("...td,...sd->...ts", query_tangent, key, precision=algorithm)
    )
  if not isinstance(key_tangent, SymbolicZero):
    # In the transpose, XLA's CPU backend takes three times as long if it
    # reads the large cotangent of the scores by columns, and not the query.
    # Without the barrier XLA folds the transposition into the product again.
    # On accelerators it would cost a copy.
    columns = jax.lax.platform_dependent(
      jnp.swapaxes(query, -1, -2),
      cpu=jax.lax.optimization_barrier,
      default=lambda columns: columns,
    )
    key_tangent = jnp.swapaxes(key_tangent, -1, -2)
    terms.append(
      _product("...dt,...ds->...ts", columns, key_tangent, precision=algorithm)
    )
  return inner_products(query, key), sum(terms)


def weighted_sum(weights: jax.Array, value: jax.Array, dtype) -> jax.Array:
  """Weights [..., t, s] times value [..., s, E], accumulated in `dtype`."""
  weights = weights.astype(value.dtype)
  return weighted_sum_of_tangents(weights, value, dtype, value)


def weighted_sum_columns(
  weights: jax.Array, columns: jax.Array, dtype
) -> jax.Array:
  """`weighted_sum` for a transposed value [..., E, s]; returns [..., E, t]."""
  weights = weights.astype(columns.dtype)
  return weighted_sum_columns_of_tangents(weights, columns, dtype, columns)


def weighted_sum_of_tangents(weights, value, dtype, tokens) -> jax.Array:
  """`weighted_sum` for tangents that are wider than the `tokens`.

  Tangents of the tokens' dtype would be rounded in the transpose, tile by tile.
  """
  algorithm = _bfloat16(tokens)
  return _product("...ts,...se->...te", weights, value, dtype, algorithm)


def weighted_sum_columns_of_tangents(
  weights, columns, dtype, tokens
) -> jax.Array:
  """`weighted_sum_of_tangents` for a transposed value [..., E, s]."""
  algorithm = _bfloat16(tokens)
  return _product("...es,...ts->...et", columns, weights, dtype, algorithm)


def _bfloat16(*operands: jax.Array) -> jax.lax.DotAlgorithmPreset | None:
  """The algorithm of products of bfloat16 tokens, as in `jax.nn`.

  In the transpose, one operand is a float32 cotangent. The algorithm rounds it
  to bfloat16 and accumulates in float32.
  """
  # On CPUs XLA computes in float32 nevertheless, and three times as long.
  if jax.default_backend() == "cpu" or precision_name(None) is not None:
    return None
  is_half = all(operand.dtype == jnp.bfloat16 for operand in operands)
  return jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if is_half else None


def _product(subscripts, left, right, dtype=None, precision=None):
  """An einsum of matrices, accumulated in `dtype` or at least float32."""
  if dtype is None:
    dtype = jnp.promote_types(jnp.result_type(left, right), jnp.float32)
  leading = left.shape[:-2]
  alike = leading == right.shape[:-2]
  if alike:
    # XLA's fast form of a transposed product needs a single batch axis.
    batch = math.prod(leading)
    left, right = (x.reshape(batch, *x.shape[-2:]) for x in (left, right))
  product = jnp.einsum(
    subscripts, left, right, precision=precision, preferred_element_type=dtype
  )
  return product.reshape(*leading, *product.shape[-2:]) if alike else product
