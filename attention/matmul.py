"""Matrix products of tiles, written so that their transposes are fast too."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero


@jax.custom_jvp
def inner_products(query: jax.Array, key: jax.Array) -> jax.Array:
  """Query . key for every pair, accumulated in float32 at least.

  Reverse mode turns the term of the key's tangent into a product of the
  scores' cotangent and the query. XLA's CPU backend multiplies it at a third
  of its speed if it has to read the large cotangent in columns; here it reads
  a transposed copy of the small query instead.

  Args:
    query: [..., t, D].
    key: [..., s, D]; leading axes broadcast.

  Returns:
    [..., t, s].

  Example:
    >>> import jax.numpy as jnp
    >>> inner_products(jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0]]))
    Array([[11.]], dtype=float32)
  """
  return _product("...td,...sd->...ts", query, key)


@functools.partial(inner_products.defjvp, symbolic_zeros=True)
def _inner_products_jvp(primals, tangents):
  query, key = primals
  query_tangent, key_tangent = tangents
  terms = []
  if not isinstance(query_tangent, SymbolicZero):
    terms.append(_product("...td,...sd->...ts", query_tangent, key))
  if not isinstance(key_tangent, SymbolicZero):
    # Without the barrier XLA folds the transposition into the product again.
    columns = jax.lax.optimization_barrier(jnp.swapaxes(query, -1, -2))
    key_tangent = jnp.swapaxes(key_tangent, -1, -2)
    terms.append(_product("...dt,...ds->...ts", columns, key_tangent))
  return inner_products(query, key), sum(terms)


def weighted_sum(weights: jax.Array, value: jax.Array, dtype) -> jax.Array:
  """sum_s weights[t, s] value[s].

  Args:
    weights: [..., t, s].
    value: [..., s, E]; the product is taken in its dtype.
    dtype: of the result, and to accumulate in.

  Returns:
    [..., t, E].

  Example:
    >>> import jax.numpy as jnp
    >>> weights, value = jnp.array([[0.5, 0.5]]), jnp.array([[1.0], [3.0]])
    >>> weighted_sum(weights, value, jnp.float32)
    Array([[2.]], dtype=float32)
  """
  weights = weights.astype(value.dtype)
  return _product("...ts,...se->...te", weights, value, dtype)


def weighted_sum_columns(
  weights: jax.Array, columns: jax.Array, dtype
) -> jax.Array:
  """The same with value and result in columns, as `inner_products` has it.

  Args:
    weights: [..., t, s].
    columns: [..., E, s], the value transposed.
    dtype: of the result, and to accumulate in.

  Returns:
    [..., E, t].

  Example:
    >>> import jax.numpy as jnp
    >>> weights, columns = jnp.array([[0.5, 0.5]]), jnp.array([[1.0, 3.0]])
    >>> weighted_sum_columns(weights, columns, jnp.float32)
    Array([[2.]], dtype=float32)
  """
  weights = weights.astype(columns.dtype)
  return _product("...es,...ts->...et", columns, weights, dtype)


def _product(subscripts, left, right, dtype=None):
  """An einsum of [..., m, n] matrices, accumulated in float32 at least."""
  if dtype is None:
    dtype = jnp.promote_types(jnp.result_type(left, right), jnp.float32)
  leading = left.shape[:-2]
  alike = leading == right.shape[:-2]
  if alike:
    # XLA finds the fast form of a transposed product with one batch axis only.
    batch = math.prod(leading)
    left, right = (x.reshape(batch, *x.shape[-2:]) for x in (left, right))
  product = jnp.einsum(subscripts, left, right, preferred_element_type=dtype)
  return product.reshape(*leading, *product.shape[-2:]) if alike else product
