"""The online softmax: the context, one tile of keys after another.

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


class Captured(NamedTuple):
  """The arrays that each function of a `Problem` captured."""

  pair: list[Any]
  bias: list[Any]
  visible: list[Any]
  multiplier: list[Any]


class Problem(NamedTuple):
  """Attention as functions of a tile."""

  tiling: Tiling
  dtype: Any
  # The context has more leading axes than the lse where values share scores.
  lse_leading: tuple[int, ...]
  # (captured, query tile, key tile) -> scores [..., t, s]
  pair: Callable
  # The others are (captured, start of the tile) -> array [..., t, s].
  bias: Callable | None
  visible: Callable | None  # None if no tile is partial
  multiplier: Callable | None

  def scores(
    self, captured: Captured, query, key, start: Sequence[Any], *, masked: bool
  ) -> jax.Array:
    """The scores and bias of a tile; if `masked`, -inf for hidden pairs."""
    scores = self.pair(captured.pair, query, key).astype(self.dtype)
    if self.bias is not None:
      scores = scores + self.bias(captured.bias, start)
    if masked and self.visible is not None:
      visible = self.visible(captured.visible, start)
      scores = jnp.where(visible, scores, -jnp.inf)
    return scores

  def dropped(self, captured: Captured, weights, start) -> jax.Array:
    """The weights of a tile after dropout."""
    if self.multiplier is None:
      return weights
    return weights * self.multiplier(captured.multiplier, start)

  def zeros(self, arguments: Any, value_size: int):
    """Zeros for a context and an lse that depend on `arguments`."""
    tiling = self.tiling
    zero = axes.varying_zero(arguments, self.dtype)
    context = (*tiling.leading, tiling.query_length, value_size)
    lse = (*self.lse_leading, tiling.query_length)
    return jnp.broadcast_to(zero, context), jnp.broadcast_to(zero, lse)


def context_and_lse(problem: Problem, captured: Captured, query, key, value):
  """The context and the lse of mapped tokens, padded to whole tiles."""
  tiling = problem.tiling
  columns, bounds = tiling.columns()
  outputs = problem.zeros((captured, query, key, value), value.shape[-1])

  def row(outputs, inputs):
    start, bound = tuple(inputs[0]), inputs[1]
    query_tile = cut(query, start, tiling.row)

    def visit(masked, position, state):
      column = jnp.asarray(columns)[position]
      key_start, tile_start = (*start[:-1], column), (*start, column)
      key_tile = cut(key, key_start, tiling.column)
      scores = problem.scores(
        captured, query_tile, key_tile, tile_start, masked=masked
      )
      value_tile = cut(value, key_start, tiling.column)
      return _updated(problem, captured, state, scores, value_tile, tile_start)

    context, lse = (cut(each, start, tiling.row) for each in outputs)
    state = (jnp.zeros_like(context), lse - jnp.inf, jnp.zeros_like(lse))
    for part, masked in enumerate((False, True)):
      state = _loop(
        functools.partial(visit, masked),
        (bound[part], bound[part + 1]),
        tiling.visits[part],
        state,
      )
    tiles = _finished(*state)
    return tuple(put(*each, start) for each in zip(outputs, tiles))

  return scan(row, outputs, (tiling.rows(), bounds))


def _updated(problem, captured, state, scores, value, start):
  """The state after one more tile of keys."""
  context, largest, total = state
  larger = jnp.maximum(largest, jnp.max(scores, axis=-1))
  # A row without a visible key so far must not subtract -inf from -inf.
  reference = jnp.where(jnp.isneginf(larger), 0.0, larger)
  shrink = jnp.exp(largest - reference)
  weights = jnp.exp(scores - reference[..., None])
  total = total * shrink + jnp.sum(weights, axis=-1)
  weights = problem.dropped(captured, weights, start)
  seen = weighted_sum(weights, value, problem.dtype)
  return context * shrink[..., None] + seen, larger, total


def _finished(context, largest, total):
  """The context and the lse once all tiles have been visited."""
  empty = total == 0.0
  total = jnp.where(empty, 1.0, total)
  lse = jnp.where(empty, -jnp.inf, largest + jnp.log(total))
  return context / total[..., None], lse


def _loop(body, bounds, length, state):
  """Loops from one bound to the other; `length` is the difference, if known."""
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
