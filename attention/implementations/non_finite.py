"""What every implementation does with tokens that hold NaN or infinity.

With a mask or a bias, a hidden token must not change anything, but 0 * NaN is
NaN. Implementations therefore compute with such tokens replaced by zero, and
the rows that attend to one become NaN at the end, so that derivatives of the
other rows do not contain a NaN either.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.request import Request

Result = tuple[jax.Array, jax.Array | None]


def with_finite_tokens(
  request: Request, compute: Callable[[Request], tuple]
) -> Result:
  """Computes with finite tokens; rows that attend to others become NaN.

  `compute` returns the context, the lse (or None, if every row attends to some
  key) and a function from flags of keys, bool [..., S], to the rows that attend
  to a flagged key, bool [..., T].
  """
  if not request.is_masked:
    return compute(request)[:2]
  tokens, (bad_query, bad_key, bad_value) = zip(*map(_finite, request.tokens))
  names = ("query", "key", "value")
  request = dataclasses.replace(request, **dict(zip(names, tokens)))
  context, lse, rows_that_see = compute(request)
  if request.combined is not None:
    return context, lse
  bad = bad_query if lse is None else bad_query & ~jnp.isneginf(lse)
  bad = rows_that_see(bad_key) | bad
  if lse is not None:
    lse = jnp.where(bad, jnp.nan, lse)
  bad = bad | rows_that_see(bad_value)
  return jnp.where(bad[..., None], jnp.nan, context), lse


def _finite(tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Tokens with zeros for bad ones, and bool [..., T]: which are bad."""
  bad = ~jnp.all(jnp.isfinite(tokens), axis=-1)
  return jnp.where(bad[..., None], jnp.zeros_like(tokens), tokens), bad
