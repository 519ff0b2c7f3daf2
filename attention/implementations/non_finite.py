"""NaN and infinity in tokens, handled alike by every implementation.

A hidden token must not change anything, but 0 * NaN is NaN. With a mask or a
bias, implementations therefore replace non-finite numbers by zeros, and set the
rows that attend to such a token to NaN at the end. Other rows have finite
derivatives.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.request import Request
from attention.softmax import Statistics


def with_finite_tokens(
  request: Request, compute: Callable[[Request], tuple]
) -> tuple[jax.Array, Statistics | None]:
  """Computes with finite tokens; rows that attend to others become NaN."""
  # `compute` returns the context, the statistics (None only if every row
  # attends to some key) and `any_flagged` for its visible pairs.
  if not request.is_masked:
    return compute(request)[:2]
  tokens, (bad_query, bad_key, bad_value) = zip(*map(_finite, request.tokens))
  names = ("query", "key", "value")
  request = dataclasses.replace(request, **dict(zip(names, tokens)))
  context, statistics, rows_attending = compute(request)
  if request.combined is not None:
    return context, statistics
  if statistics is None or not request.return_lse:
    # One pass over the pairs; the statistics are not used.
    bad = rows_attending(bad_key | bad_value, bad_query)
  else:
    bad = rows_attending(bad_key, bad_query)
    statistics = Statistics(
      *(jnp.where(bad, jnp.nan, each) for each in statistics)
    )
    bad = bad | rows_attending(bad_value)
  return jnp.where(bad[..., None], jnp.nan, context), statistics


def any_flagged(
  visible: jax.Array, keys: jax.Array, queries: jax.Array | None = None
) -> jax.Array:
  """Which queries attend to a flagged key, or are flagged and attend to any.

  Args:
    visible: bool [..., T, S].
    keys: bool [..., S].
    queries: bool [..., T]; None means that none is flagged.

  Returns:
    bool [..., T].
  """
  flags = keys[..., None, :]
  if queries is not None:
    flags = flags | queries[..., :, None]
  return jnp.any(visible & flags, axis=-1)


def _finite(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Tokens with zeros for non-finite numbers, and which tokens had some."""
  # Numbers, not whole tokens, so that one kernel computes both results.
  finite = jnp.isfinite(tokens)
  zeros = jnp.zeros_like(tokens)
  return jnp.where(finite, tokens, zeros), ~jnp.all(finite, axis=-1)
