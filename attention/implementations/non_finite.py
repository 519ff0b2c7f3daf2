"""NaN and infinity in tokens, handled alike by every implementation.

A hidden token must not change anything, but 0 * NaN is NaN. With a mask or a
bias, implementations therefore replace non-finite numbers by zeros, and set the
rows that attend to such a token to NaN at the end. Other rows have finite
derivatives.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from attention.arrays import axes
from attention.arrays.softmax import Statistics
from attention.implementations.closure import without_captured
from attention.request import Request
from attention.transforms.custom_transpose import (
  jvp_of_active,
  with_own_derivatives,
  with_transpose,
)
from attention.transforms.tangent_rule import KeptJvp


def with_finite_tokens(
  request: Request, compute: Callable[[Request], tuple]
) -> tuple[jax.Array, Statistics | None]:
  """Computes with finite tokens; rows that attend to others become NaN."""
  # `compute` returns the context, the statistics (None only if every row
  # attends to some key) and `any_flagged` for its visible pairs.
  if not request.is_masked:
    return compute(request)[:2]
  query, key, query_flags, key_flags = finite_query_and_key(request)
  value, value_flags = _finite(request.value, keeps_cotangents=True)
  request = dataclasses.replace(request, query=query, key=key, value=value)
  context, statistics, rows_attending = compute(request)
  if request.combined is not None:
    return context, statistics
  if statistics is None or not request.return_lse:
    # One pass over the pairs; the statistics are not used.
    return _with_nan(
      context,
      value_flags,
      lambda value_flags: rows_attending(key_flags | value_flags, query_flags),
    ), statistics
  row_flags = rows_attending(key_flags, query_flags)
  statistics = Statistics(
    *(jnp.where(row_flags, jnp.nan, each) for each in statistics)
  )
  context = _with_nan(
    context,
    value_flags,
    lambda value_flags: row_flags | rows_attending(value_flags),
  )
  return context, statistics


def finite_query_and_key(request: Request) -> list[jax.Array]:
  """Finite queries and keys; which queries and keys were not."""
  is_finite = request.score.is_finite
  query, key = (
    _finite(each, keeps_cotangents=is_finite)
    for each in (request.query, request.key)
  )
  if not request.score.reads_keys:
    key = [request.key, jnp.zeros_like(key[1])]
  return [query[0], key[0], query[1], key[1]]


def finite(tokens: jax.Array) -> jax.Array:
  """Zeros for NaN and infinity, whose cotangents are zero already."""
  return where_finite(jnp.isfinite(tokens), tokens, keeps_cotangents=True)


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
  flags = [keys] if queries is None else [keys, queries]
  return jax.lax.platform_dependent(
    visible, *flags, tpu=_any_flagged_by_product, default=_any_flagged
  )


def _any_flagged(visible, keys, queries=None) -> jax.Array:
  flags = keys[..., None, :]
  if queries is not None:
    flags = flags | queries[..., :, None]
  return jnp.any(visible & flags, axis=-1)


def _any_flagged_by_product(visible, keys, queries=None) -> jax.Array:
  """A product, for a mask that has fewer leading axes than the flags."""
  shape = (*visible.shape[:-1], keys.shape[-1])
  visible = jnp.broadcast_to(visible, shape)
  # With the barrier, the softmax computes the mask in its own layout.
  numbers = jax.lax.optimization_barrier(visible).astype(jnp.float32)
  attends = (numbers @ keys.astype(jnp.float32)[..., None])[..., 0] > 0.0
  if queries is not None:
    attends = attends | queries & jnp.any(visible, axis=-1)
  return attends


def _finite(tokens: jax.Array, *, keeps_cotangents: bool) -> list[jax.Array]:
  """Tokens with zeros for non-finite numbers, and which tokens had some."""

  def function(_, arguments):
    # Numbers, not whole tokens, so that one kernel computes both results.
    finite = jnp.isfinite(arguments[0])
    cleaned = where_finite(
      finite, arguments[0], keeps_cotangents=keeps_cotangents
    )
    return [cleaned, ~jnp.all(finite, axis=-1)]

  return with_own_derivatives(function, _identity, [], [tokens])


def where_finite(
  finite: jax.Array, numbers: jax.Array, *, keeps_cotangents: bool
) -> jax.Array:
  """Zeros for numbers, or tangents, of tokens that are not finite.

  Rows that attend to a non-finite token have no derivatives, and other rows
  none with respect to it: its cotangent is zero already and may be kept, unless
  the score has infinite derivatives at a token of zeros.
  """
  if not keeps_cotangents:
    return _where_finite([finite], [numbers])[0]
  return with_transpose(_where_finite, _identity, [finite], [numbers])[0]


def _identity(_, cotangents):
  return cotangents[:1]


def _where_finite(residuals, arguments):
  (finite,), (tokens,) = residuals, arguments
  return [jnp.where(finite, tokens, jnp.zeros_like(tokens))]


def _with_nan(
  context: jax.Array,
  value_flags: jax.Array,
  row_flags_of: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """The context with NaN in the `row_flags_of` of flags of values."""
  # `jax.linear_transpose` assumes that all values are finite.
  if not isinstance(value_flags, jax.core.Tracer):
    return jnp.where(row_flags_of(value_flags)[..., None], jnp.nan, context)
  arguments = axes.varying_alike([context, value_flags])
  program, captured = without_captured(row_flags_of, arguments[1])
  shape = value_flags.shape

  def function(captured, arguments):
    context, value_flags = arguments
    row_flags = program(captured, value_flags)
    return [jnp.where(row_flags[..., None], jnp.nan, context)]

  def transpose(captured, cotangents):
    row_flags = program(captured, jnp.zeros(shape, bool))
    return [jnp.where(row_flags[..., None], 0.0, cotangents[0]), None]

  (context,) = with_own_derivatives(function, transpose, captured, arguments)
  return context


def mapped(
  function: Callable[[jax.Array], jax.Array],
  tokens: jax.Array,
  *,
  is_masked: bool,
) -> jax.Array:
  """function(tokens), which keeps NaN.

  If keys may be hidden, derivatives are those at finite tokens.
  """
  program, captured = without_captured(function, tokens)
  if not program.jaxpr.eqns:
    return function(tokens)

  @KeptJvp
  def compute(arrays):
    return program(arrays[1:], arrays[0])

  @functools.partial(compute.defjvp, symbolic_zeros=True)
  def rule(primals, tangents):
    (arrays,), (of_arrays,) = primals, tangents
    result = compute(arrays)
    known = [None if type(x) is SymbolicZero else x for x in of_arrays]
    if all(each is None for each in known):
      return result, jnp.zeros_like(result)
    if is_masked:
      arrays = [_zeros_for_non_finite(arrays[0]), *arrays[1:]]
    return result, jvp_of_active(
      lambda tokens, *captured: program(captured, tokens), arrays, known
    )[1]

  # JAX fails for a NumPy array as the argument of a custom rule in `jax.vmap`.
  return compute([tokens * 1, *map(jnp.asarray, captured)])


def _zeros_for_non_finite(tokens: jax.Array) -> jax.Array:
  return jnp.where(jnp.isfinite(tokens), tokens, jnp.zeros_like(tokens))
