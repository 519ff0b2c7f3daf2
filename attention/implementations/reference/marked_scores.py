"""Scores that are NaN where a token of the pair is not finite."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.implementations.dot_products import constant_factor, dot_product
from attention.implementations.non_finite import (
  finite,
  finite_query_and_key,
  mapped,
)
from attention.matmul import inner_products, matmul_precision
from attention.request import Request
from attention.scores.classical import is_half

# (arrays, value) -> scores [..., T, S].
ScoresOf = Callable[[list[jax.Array], jax.Array], jax.Array]


def marked_scores(request: Request) -> tuple[list[jax.Array], ScoresOf]:
  """The scores as a function of arrays and the value, and these arrays."""
  factor = _factor(request)
  if factor is None:
    return _with_flags(request)
  score, precision = request.score, request.precision
  query = mapped(score.map_query, request.query, is_masked=True)
  key = mapped(score.map_key, request.key, is_masked=True)

  def of_value(arrays, value):
    products = _products(precision, *arrays, value)
    return products.astype(request.dtype) * factor

  return [query, key], of_value


def _factor(request: Request) -> float | None:
  """The factor of products of mapped tokens; None for other scores."""
  score = dot_product(request.score)
  if score is None or not score.is_finite or request.key.shape[-1] == 0:
    return None
  is_scaled = is_half(request.query)  # the map of the query scales others
  return constant_factor(score, request.query) if is_scaled else 1.0


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _products(precision, query, key, value) -> jax.Array:
  """The products of queries and keys, NaN where a token is not finite."""
  # One feature of NaN makes all products of a token NaN, so the flags of a
  # value may be features of its key. XLA joins each `where` with the product;
  # only keys and values of different numbers of features need a pass for flags.
  del precision
  is_bad = ~jnp.isfinite(value)
  if value.shape[-1] != key.shape[-1]:
    is_bad = jnp.any(is_bad, axis=-1, keepdims=True)
  query = jnp.where(jnp.isfinite(query), query, jnp.nan)
  key = jnp.where(is_bad | ~jnp.isfinite(key), jnp.nan, key)
  return inner_products(query, key)


@_products.defjvp
def _products_jvp(precision, primals, tangents):
  def differentiable(query, key):
    return inner_products(finite(query), finite(key))

  with matmul_precision(precision):
    tangent = jax.jvp(differentiable, primals[:2], tangents[:2])[1]
    return _products(precision, *primals), tangent


def _with_flags(request: Request) -> tuple[list[jax.Array], ScoresOf]:
  """The scores of finite tokens, and marks of the others."""
  query, key, *flags = finite_query_and_key(request)
  scores = request.score(query, key).astype(request.dtype)

  def of_value(arrays, value):
    scores, bad_query, bad_key = arrays
    bad_key = bad_key | ~jnp.all(jnp.isfinite(value), axis=-1)
    marks = bad_query[..., :, None] | bad_key[..., None, :]
    return jnp.where(marks, jnp.nan, scores)

  return [scores, *flags], of_value
