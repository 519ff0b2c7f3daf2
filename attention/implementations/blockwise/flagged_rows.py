"""The rows that attend to flagged tokens, one tile after another."""

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.implementations.blockwise.problem import (
  Captured,
  Problem,
  TileOptions,
  make_problem,
)
from attention.implementations.blockwise.tiles import (
  cut,
  put,
  scan,
  with_length,
)


def rows_attending(
  options: TileOptions, keys: jax.Array, queries: jax.Array | None = None
) -> jax.Array:
  """Which queries attend to a flagged key, or are flagged and attend to any."""
  # Flags are bool, of keys [..., S] and of queries [..., T].
  tiling, request = options.tiling, options.request
  length = request.scores_shape[-2]
  if queries is None:
    queries = jnp.zeros(length, bool)
  flags = keys, queries
  is_eager = request.platform is not None
  # Usually no token is flagged.
  if (
    is_eager
    and not any(isinstance(each, jax.core.Tracer) for each in flags)
    and not any(each.any() for each in flags)
  ):
    return jnp.zeros((*tiling.leading, length), bool)
  lengths = tiling.key_length, tiling.query_length
  padded = [
    with_length(*each, "constant", axis=-1) for each in zip(flags, lengths)
  ]
  problem, captured = make_problem((None, []), options, ())
  compute = _compiled_rows_attending if is_eager else _rows_attending
  return compute(problem, captured, *padded)[..., :length]


def _rows_attending(
  problem: Problem, captured: Captured, keys: jax.Array, queries: jax.Array
) -> jax.Array:
  """`rows_attending`, for S and T rounded up to whole tiles."""
  tiling = problem.tiling
  none = axes.varying_zero((keys, queries, captured), jnp.bool_)
  none = jnp.broadcast_to(none, (*tiling.leading, tiling.query_length))
  queries = jnp.broadcast_to(queries, none.shape)

  def step(rows, start):
    *row, column = start
    of_keys = cut(keys, (*row[:-1], column), tiling.column)
    of_queries = cut(queries, row, tiling.row)
    allowed = problem.allowed(captured, (*row, column))
    flagged = of_keys[..., None, :] | of_queries[..., :, None]
    attends = jnp.any(allowed & flagged, axis=-1)
    return put(rows, attends | cut(rows, row, tiling.row), row)

  return jax.lax.cond(
    jnp.any(keys) | jnp.any(queries),
    lambda: scan(step, none, tiling.visible_tiles()),
    lambda: none,
  )


_compiled_rows_attending = jax.jit(_rows_attending, static_argnums=0)
