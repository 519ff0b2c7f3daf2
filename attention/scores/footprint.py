"""How much memory a score needs, read off its computation."""

import math

import jax
from jax.extend.core import jaxprs_in_params

from attention.scores.base import Score


def elements_per_pair(score: Score, query: jax.Array, key: jax.Array) -> int:
  """How many numbers a score needs at once for a query and a key.

  Args:
    score: a bound score.
    query: [..., T, Dq].
    key: [..., S, Dk].

  Returns:
    1 for a dot product, D where all of query - key is made.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention.scores import as_score
    >>> apart = as_score(lambda q, k: -abs(q[:, None] - k[None]).sum(-1))
    >>> elements_per_pair(apart, jnp.ones((64, 3)), jnp.ones((64, 3)))
    3
  """
  numbers = [1]

  def trace(query, key):
    query, key = score.map_query(query), score.map_key(key)
    closed = jax.make_jaxpr(score.pair)(query, key)
    largest = _largest(closed.jaxpr)
    if largest > max(query.size, key.size):  # else the tokens in another shape
      pairs = max(math.prod(closed.out_avals[0].shape), 1)
      numbers.append(-(-largest // pairs))

  jax.eval_shape(trace, query, key)
  return max(numbers)


def _largest(jaxpr) -> int:
  """The size of the largest array that a computation makes."""
  sizes = [0]
  for equation in jaxpr.eqns:
    sizes += [variable.aval.size for variable in equation.outvars]
    sizes += map(_largest, jaxprs_in_params(equation.params))
  return max(sizes)
