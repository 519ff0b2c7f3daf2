"""The running softmax: the context, one tile of keys after another.

See "Self-attention Does Not Need O(n^2) Memory", Rabe and Staats, 2021
(https://arxiv.org/abs/2112.05682).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention import axes
from attention.implementations.blockwise.tiles import Tiling, cut, put, scan
from attention.matmul import weighted_sum


class Problem(NamedTuple):
  """Attention as functions of a tile and its start.

  Attributes:
    tiling: the tiles.
    dtype: of the statistics and the results.
    lse_leading: the leading axes of the scores and the lse; the context may
      have more, where values share scores.
    scores: two functions (query tile, key tile, start) to [..., t, s], bias
      included: for tiles that are seen in full, and for those that are seen in
      part, -inf where nothing is.
    multiplier: (start) to what the weights are multiplied with; None for 1.

  The functions have one more argument in front: the arrays they would else
  capture. `bound` gives it to them.
  """

  tiling: Tiling
  dtype: Any
  lse_leading: tuple[int, ...]
  scores: tuple[Callable, Callable]
  multiplier: Callable | None

  def bound(self, captured: "Captured") -> "Problem":
    """The problem with what its functions capture."""
    full, part, multiplier = captured
    return self._replace(
      scores=(
        functools.partial(self.scores[0], full),
        functools.partial(self.scores[1], part),
      ),
      multiplier=self.multiplier
      and functools.partial(self.multiplier, multiplier),
    )

  def dropped(self, weights: jax.Array, start: Sequence[Any]) -> jax.Array:
    """The weights of the tile at `start` after dropout."""
    if self.multiplier is None:
      return weights
    return weights * self.multiplier(start)

  def zeros(self, arguments: Any, value_size: int):
    """A context [..., T, E] and an lse [..., T] of zeros.

    Args:
      arguments: all arrays that they will depend on.
      value_size: E.

    Returns:
      The two.
    """
    tiling = self.tiling
    zero = axes.varying_zero(arguments, self.dtype)
    context = (*tiling.leading, tiling.query_length, value_size)
    lse = (*self.lse_leading, tiling.query_length)
    return jnp.broadcast_to(zero, context), jnp.broadcast_to(zero, lse)


# What the two functions of scores and the multiplier capture.
Captured = tuple[list[Any], list[Any], list[Any]]


def context_and_lse(
  problem: Problem,
  captured: Captured,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The context [..., T, E] and the lse [..., T].

  Args:
    problem: the functions of a tile.
    captured: what they capture.
    query: [..., T, X], mapped; T is a multiple of the tile's size.
    key: [..., S, Y], mapped; so is S.
    value: [..., S, E].

  Returns:
    Both in the problem's dtype.
  """
  tiling = problem.tiling
  columns, bounds = tiling.columns()
  outputs = problem.zeros((captured, query, key, value), value.shape[-1])
  problem = problem.bound(captured)

  def row(outputs, inputs):
    start, bound = tuple(inputs[0]), inputs[1]
    query_tile = cut(query, start, tiling.row)

    def visit(scores, position, state):
      column = jnp.asarray(columns)[position]
      key_start, tile_start = (*start[:-1], column), (*start, column)
      key_tile = cut(key, key_start, tiling.column)
      return _updated(
        problem,
        state,
        scores(query_tile, key_tile, tile_start),
        cut(value, key_start, tiling.column),
        tile_start,
      )

    context, lse = (cut(each, start, tiling.row) for each in outputs)
    state = (jnp.zeros_like(context), lse - jnp.inf, jnp.zeros_like(lse))
    for part, scores in enumerate(problem.scores):
      state = _loop(
        functools.partial(visit, scores),
        (bound[part], bound[part + 1]),
        tiling.visits[part],
        state,
      )
    tiles = _finished(*state)
    return tuple(put(*each, start) for each in zip(outputs, tiles))

  return scan(row, outputs, (tiling.rows(), bounds))


def _updated(problem, state, scores, value, start):
  """The state after one more tile of keys."""
  context, largest, total = state
  larger = jnp.maximum(largest, jnp.max(scores, axis=-1))
  # A row that has seen nothing yet must not subtract -inf from -inf.
  reference = jnp.where(jnp.isneginf(larger), 0.0, larger)
  shrink = jnp.exp(largest - reference)
  weights = jnp.exp(scores - reference[..., None])
  total = total * shrink + jnp.sum(weights, axis=-1)
  weights = problem.dropped(weights, start)
  seen = weighted_sum(weights, value, problem.dtype)
  return context * shrink[..., None] + seen, larger, total


def _finished(context, largest, total):
  """The context and the lse once all tiles have been visited."""
  empty = total == 0.0
  total = jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
  return context / total[..., None], lse


def _loop(body, bounds, length, state):
  """Loops from one bound to the other, `length` steps if that is known."""
  start, stop = bounds
  if length is None:
    return jax.lax.fori_loop(start, stop, body, state)
  if length == 0:
    return state
  if length == 1:
    return body(start, state)
  return jax.lax.fori_loop(
    0, length, lambda step, state: body(start + step, state), state
  )
