"""The arrays of tokens that the kernel reads, of a request."""

import math

import jax
import jax.numpy as jnp

from attention.implementations.dot_products import constant_factor, dot_product
from attention.request import Request
from attention.scores import Score
from attention.scores.classical import ScaledDot, scaled


def mapped(request: Request) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The query and the key, mapped by the score, and the value."""
  score = request.score
  query, key = score.map_query(request.query), score.map_key(request.key)
  if constant_factor(score, query) is None:  # the kernel takes numbers only
    inner = dot_product(score)
    assert isinstance(inner, ScaledDot)
    query = scaled(query, inner.factor(query))
  return query, key, request.value


def scale_of(score: Score, query: jax.Array) -> float:
  """The scale that `mapped` has not applied."""
  factor = constant_factor(score, query)
  return 1.0 if factor is None else factor


def with_features(tokens: jax.Array, number: int) -> jax.Array:
  """Tokens with zeros after their own features."""
  missing = number - tokens.shape[-1]
  if not missing:
    return tokens
  return jnp.pad(tokens, [(0, 0)] * (tokens.ndim - 1) + [(0, missing)])


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
