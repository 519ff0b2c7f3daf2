"""tanh(q + k) from maps of q and of k, without a hyperbolic tangent.

A form is a map of tokens and tanh(q + k) as a function of mapped tokens.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

Tanh = Callable[[jax.Array, jax.Array], jax.Array]


def of_small(query, key):
  """tanh(q + k) from exp(2 q) - 1 and exp(2 k) - 1."""
  gap = query + key + query * key
  return gap / (gap + 2.0)


def of_moderate(query, key):
  """tanh(q + k) from exp(2 q) and exp(2 k)."""
  return 1.0 - 2.0 / (1.0 + query * key)


def of_any(query, key):
  """tanh(q + k) from q and k."""
  return jnp.tanh(query + key)


FORMS: tuple[tuple[Callable[[jax.Array], jax.Array], Tanh], ...] = (
  (lambda tokens: jnp.expm1(2.0 * tokens), of_small),
  (lambda tokens: jnp.exp(2.0 * tokens), of_moderate),
  (lambda tokens: tokens, of_any),
)


def weighted_two(
  tanh: Tanh,
  queries: Sequence[jax.Array],
  keys: Sequence[jax.Array],
  weights: Sequence[jax.Array],
) -> jax.Array:
  """The sum of weight * tanh(query, key) over two channels."""
  one, other = weights
  if tanh is not of_moderate:
    return one * tanh(queries[0], keys[0]) + other * tanh(queries[1], keys[1])
  # w / a + v / b by one division, which costs more than three products.
  a, b = (1.0 + query * key for query, key in zip(queries, keys))
  return (one + other) - 2.0 * ((one * b + other * a) / (a * b))


def moderate_limit(dtype: jnp.dtype) -> float:
  """The size of q and k up to which `of_moderate` is finite, and in pairs."""
  # `weighted_two` multiplies two divisors, each at most 1 + exp(4 size), and
  # the derivative of a division squares its divisor.
  return 10.0 if dtype == jnp.float32 else 85.0
