"""The arrays of tokens that the kernel reads, of a request."""

import math
import numbers

import jax
import jax.numpy as jnp

from attention.request import Request
from attention.scores import Score
from attention.scores.base import Placed
from attention.scores.classical import DotProduct, ScaledDot, scaled
from attention.scores.wrappers import MappedKeys, QueryKeyNorm

_SINGLE = (Placed, MappedKeys, QueryKeyNorm)


def dot_product(score: Score) -> DotProduct | None:
  """The dot product of mapped tokens that a score computes, or None."""
  while isinstance(score, _SINGLE):
    score = score.score
  return score if isinstance(score, DotProduct) else None


def mapped(request: Request) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The query and the key, mapped by the score, and the value."""
  score = request.score
  query, key = score.map_query(request.query), score.map_key(request.key)
  inner = dot_product(score)
  if isinstance(inner, ScaledDot):
    factor = inner.factor(query)
    if not isinstance(factor, numbers.Real):  # the kernel takes numbers only
      query = scaled(query, factor)
  return query, key, request.value


def scale_of(score: Score, query: jax.Array) -> float:
  """The scale that `mapped` has not applied."""
  inner = dot_product(score)
  factor = inner.factor(query) if isinstance(inner, ScaledDot) else 1.0
  return float(factor) if isinstance(factor, numbers.Real) else 1.0


def all_batched(*tokens):
  """Batches all arrays over every `jax.vmap` axis, as JAX's kernel requires."""
  zero = jnp.zeros((), tokens[0].dtype)
  for array in tokens:
    zero = jnp.where(False, array.ravel()[0], zero)
  return [array + zero for array in tokens]


def heads_of(query, key, value):
  """(B, H) and (B, K) of queries and of keys, or None if they have neither."""
  leading, memory = query.shape[:-2], key.shape[:-2]
  if memory != value.shape[:-2]:
    return None
  if leading == memory:
    batch, heads = math.prod(leading[:-1]), math.prod(leading[-1:])
    return (batch, heads), (batch, heads)
  if leading[:-1] == memory[:-1] and memory[-1] == 1:
    batch, groups = math.prod(leading[:-1]), leading[-1]
    return (batch, groups), (batch, 1)
  return None


def own_heads(query, key, value):
  """The two leading axes of query, key and value for the kernel."""
  query_heads, memory_heads = heads_of(query, key, value)
  return query_heads, memory_heads, memory_heads
