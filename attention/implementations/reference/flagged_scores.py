"""Scores that are NaN where a token of the pair is not finite."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.arrays.matmul import inner_products, matmul_precision
from attention.implementations.dot_products import constant_factor, dot_product
from attention.implementations.non_finite import (
  finite,
  finite_query_and_key,
  mapped,
)
from attention.request import Request
from attention.scores.classical import is_half
from attention.transforms.custom_transpose import with_transpose
from attention.transforms.tangent_rule import KeptJvp

# (arrays, value) -> scores [..., T, S], NaN also where the value is not finite.
ScoresOf = Callable[[list[jax.Array], jax.Array | None], jax.Array]


def flagged_scores(request: Request) -> tuple[list[jax.Array], ScoresOf]:
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


@functools.partial(KeptJvp, nondiff_argnums=(0,))
def _products(precision, query, key, value) -> jax.Array:
  """The products of queries and keys, NaN where a token is not finite."""
  # One feature of NaN makes all products of a token NaN, so the flags of a
  # value may be features of its key. XLA joins each `where` with the product;
  # only keys and values of different numbers of features need a pass for flags.
  del precision
  if value is not None:
    is_flagged = ~jnp.isfinite(value)
    if value.shape[-1] != key.shape[-1]:
      is_flagged = jnp.any(is_flagged, axis=-1, keepdims=True)
    key = jnp.where(is_flagged, jnp.nan, key)
  return jax.lax.platform_dependent(
    query, key, cuda=_flagged_products, default=_products_of_flagged
  )


def _flagged_products(query, key) -> jax.Array:
  # The softmax reads the products in any case. Those of a token that is not
  # finite are not finite, and others are unless they overflow.
  products = inner_products(query, key)
  # Triton has no `isfinite`.
  return jnp.where(jnp.abs(products) < jnp.inf, products, jnp.nan)


def _products_of_flagged(query, key) -> jax.Array:
  query, key = (
    jnp.where(jnp.isfinite(tokens), tokens, jnp.nan) for tokens in (query, key)
  )
  return inner_products(query, key)


@_products.defjvp
def _products_jvp(precision, primals, tangents):
  with matmul_precision(precision):
    tangents = [*tangents[:2]]
    (tangent,) = with_transpose(_tangent, _cotangents, [*primals[:2]], tangents)
    return _products(precision, *primals), tangent


def _products_of_finite(query, key) -> jax.Array:
  return inner_products(finite(query), finite(key))


def _tangent(tokens, tangents) -> list[jax.Array]:
  """The tangent of products; NaN where a token is, as weights are 0 there."""
  return [_tangent_of(tokens, tangents)]


@KeptJvp
def _tangent_of(tokens, tangents):
  return jax.jvp(inner_products, [*tokens], [*tangents])[1]


@_tangent_of.defjvp
def _tangent_of_jvp(primals, tangents):
  # Cotangents are 0 where a token is NaN, and so must be their products.
  def of_finite(tokens, tangents):
    return jax.jvp(_products_of_finite, [*tokens], [*tangents])[1]

  return _tangent_of(*primals), jax.jvp(of_finite, primals, tangents)[1]


def _cotangents(tokens, cotangents) -> list[jax.Array]:
  return [*jax.vjp(_products_of_finite, *tokens)[1](*cotangents)]


def _with_flags(request: Request) -> tuple[list[jax.Array], ScoresOf]:
  """The scores of finite tokens, and flags of the others."""
  query, key, *flags = finite_query_and_key(request)
  scores = request.score(query, key).astype(request.dtype)

  def of_value(arrays, value):
    scores, query_flags, key_flags = arrays
    if value is not None:
      key_flags = key_flags | ~jnp.all(jnp.isfinite(value), axis=-1)
    flags_of_pairs = query_flags[..., :, None] | key_flags[..., None, :]
    return jnp.where(flags_of_pairs, jnp.nan, scores)

  return [scores, *flags], of_value
