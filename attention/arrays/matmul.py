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
  """The name of a `precision` argument; None is the current default."""
  # A rule of derivatives may be traced after the call that defines it. It keeps
  # this name.
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
  return _products(precision_name(None), "...td,...sd->...ts", query, key)


def products_with_columns(query: jax.Array, columns: jax.Array) -> jax.Array:
  """Query [..., t, D] times columns [..., D, s], in float32 at least."""
  return _products(precision_name(None), "...td,...ds->...ts", query, columns)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _products(precision, equation, query, key):
  del precision
  return _product(equation, query, key)


@functools.partial(_products.defjvp, symbolic_zeros=True)
def _products_jvp(precision, equation, tokens, tangents):
  query, key = tokens
  query_tangent, key_tangent = tangents
  with matmul_precision(precision):
    terms = []
    if not isinstance(query_tangent, SymbolicZero):
      terms.append(_rounded_product(equation, query_tangent, key, tokens))
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
      if equation == "...td,...sd->...ts":
        key_tangent = jnp.swapaxes(key_tangent, -1, -2)
      terms.append(
        _rounded_product("...dt,...ds->...ts", columns, key_tangent, tokens)
      )
    products = _products(precision_name(None), equation, query, key)
    return products, sum(terms)


def weighted_sum(weights: jax.Array, value: jax.Array, dtype) -> jax.Array:
  """Weights [..., t, s] times value [..., s, E], accumulated in `dtype`."""
  return _sum("...ts,...se->...te", weights.astype(value.dtype), value, dtype)


def weighted_sum_columns(
  weights: jax.Array, columns: jax.Array, dtype
) -> jax.Array:
  """`weighted_sum` for a transposed value [..., E, s]; returns [..., E, t]."""
  weights = weights.astype(columns.dtype)
  return _sum("...es,...ts->...et", columns, weights, dtype)


def _sum(subscripts, left, right, dtype):
  """A product of two factors of one dtype."""
  if left.dtype != jnp.bfloat16:
    return _product(subscripts, left, right, dtype)
  name = precision_name(None)
  return _half_sum(subscripts, jnp.dtype(dtype), name, left, right)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _half_sum(subscripts, dtype, precision, left, right):
  del precision
  return _product(subscripts, left, right, dtype)


@functools.partial(_half_sum.defjvp, symbolic_zeros=True)
def _half_sum_jvp(subscripts, dtype, precision, primals, tangents):
  result = _half_sum(subscripts, dtype, precision, *primals)
  (left, right), terms = primals, []
  with matmul_precision(precision):
    for factors in ((tangents[0], right), (left, tangents[1])):
      if not any(isinstance(each, SymbolicZero) for each in factors):
        terms.append(_rounded_product(subscripts, *factors, primals, dtype))
  return result, sum(terms)


def weighted_sum_of_tangents(weights, value, dtype, tokens) -> jax.Array:
  """`weighted_sum` for tangents that are wider than the `tokens`."""
  # Tangents of the tokens' dtype would be rounded in the transpose, tile by
  # tile.
  return _rounded_product("...ts,...se->...te", weights, value, [tokens], dtype)


def weighted_sum_columns_of_tangents(
  weights, columns, dtype, tokens
) -> jax.Array:
  """`weighted_sum_of_tangents` for a transposed value [..., E, s]."""
  return _rounded_product(
    "...es,...ts->...et", columns, weights, [tokens], dtype
  )


def _rounded_product(subscripts, left, right, tokens, dtype=None):
  """A product that is rounded as in `jax.nn` if its tokens are bfloat16."""
  # Its transpose has one operand that is a float32 cotangent. The algorithm
  # rounds it to bfloat16 and accumulates in float32.
  product = functools.partial(_product, subscripts, dtype=dtype)
  is_half = all(each.dtype == jnp.bfloat16 for each in tokens)
  if not is_half or precision_name(None) is not None:
    return product(left, right)
  algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32
  return jax.lax.platform_dependent(
    left,
    right,
    # XLA computes in float32 nevertheless, and three times as long.
    cpu=product,
    default=functools.partial(product, precision=algorithm),
  )


def _product(subscripts, left, right, dtype=None, precision=None):
  """An einsum of matrices, accumulated in `dtype` or at least float32."""
  if dtype is None:
    dtype = jnp.promote_types(jnp.result_type(left, right), jnp.float32)
  if left.dtype == jnp.bfloat16:
    left, right = _without_outer_sharing(left, right)
  product = functools.partial(
    jnp.einsum, subscripts, precision=precision, preferred_element_type=dtype
  )
  if left.ndim < 4 or left.shape[:-2] != right.shape[:-2]:
    return product(left, right)
  return jax.lax.platform_dependent(
    left,
    right,
    # XLA's fast form of a transposed product needs a single batch axis.
    cpu=functools.partial(_with_one_batch_axis, product),
    # On a TPU the reshaped axes would keep XLA from joining a product with
    # the softmax.
    default=product,
  )


def _with_one_batch_axis(product, left, right):
  leading = left.shape[:-2]
  result = product(
    *(x.reshape(math.prod(leading), *x.shape[-2:]) for x in (left, right))
  )
  return result.reshape(*leading, *result.shape[-2:])


def _without_outer_sharing(left, right) -> tuple[jax.Array, jax.Array]:
  """The factors; one that only inner leading axes index is broadcast."""
  # XLA's CPU backend has no product of bfloat16 in the order that `einsum`
  # chooses for [B, H, t, s] and [1, H, s, E].
  rank = max(left.ndim, right.ndim)
  shapes = [
    (1,) * (rank - each.ndim) + each.shape[:-2] for each in (left, right)
  ]
  leading = jnp.broadcast_shapes(*shapes)

  def broadcast(tokens, shape):
    own = [axis for axis, size in enumerate(shape) if size != 1]
    shared = [
      axis for axis, size in enumerate(shape) if size == 1 != leading[axis]
    ]
    if not own or not shared or min(shared) > max(own):
      return tokens
    return jnp.broadcast_to(tokens, (*leading, *tokens.shape[-2:]))

  return broadcast(left, shapes[0]), broadcast(right, shapes[1])
