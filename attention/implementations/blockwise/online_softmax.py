"""The online softmax: the context, one tile of keys after another.

See "Self-attention Does Not Need O(n^2) Memory", Rabe and Staats, 2021
(https://arxiv.org/abs/2112.05682). Other normalizers that are fractions of
exponentials (`OnlineNormalizer`) are computed in the same way.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention import axes
from attention.implementations.blockwise.tiles import Tiling, cut, put, scan
from attention.matmul import weighted_sum
from attention.normalizers import OnlineNormalizer, is_softmax
from attention.softmax import Statistics, without_keys


class Captured(NamedTuple):
  """The arrays that each function of a `Problem` captured."""

  pair: list[Any]
  bias: list[Any]
  visible: list[Any]
  multiplier: list[Any]
  occupied: list[Any]


class Problem(NamedTuple):
  """Attention as functions of a tile."""

  tiling: Tiling
  dtype: Any
  # The context has more leading axes than the statistics where values share
  # scores.
  row_leading: tuple[int, ...]
  precision: str | None  # of matrix products, see `Request.precision`
  normalizer: Any  # an `OnlineNormalizer` without arrays, or None
  # (captured, query tile, key tile, start of the tile) -> scores [..., t, s],
  # see `Request.pair_at`
  pair: Callable
  # The others are (captured, start of the tile) -> array [..., t, s].
  bias: Callable | None
  visible: Callable | None  # None if no tile is partial
  multiplier: Callable | None
  # -> bool: whether the tile has a visible pair. None if all may have one.
  occupied: Callable | None

  def scores(
    self, captured: Captured, query, key, start: Sequence[Any], *, masked: bool
  ) -> Any:
    """The scores and bias of a tile; if `masked`, -inf for hidden pairs."""
    bias = visible = None
    if self.bias is not None:
      bias = self.bias(captured.bias, start)
    if masked and self.visible is not None:
      visible = self.visible(captured.visible, start)

    def completed(scores):
      scores = scores.astype(self.dtype)
      if bias is not None:
        scores = scores + bias
        if not is_softmax(self.normalizer):
          # Terms of the user's may have infinite derivatives at -inf.
          scores = jnp.where(jnp.isneginf(bias), -jnp.inf, scores)
      if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
      return scores

    return jax.tree.map(completed, self.pair(captured.pair, query, key, start))

  def allowed(self, captured: Captured, start: Sequence[Any]) -> jax.Array:
    """Which pairs of a tile neither the mask nor a bias of -inf hides."""
    allowed = jnp.ones((1,) * len(start), bool)
    if self.visible is not None:
      allowed = allowed & self.visible(captured.visible, start)
    if self.bias is not None:
      allowed = allowed & ~jnp.isneginf(self.bias(captured.bias, start))
    return allowed

  def dropped(self, captured: Captured, weights, start) -> jax.Array:
    """The weights of a tile after dropout."""
    if self.multiplier is None:
      return weights
    return weights * self.multiplier(captured.multiplier, start)

  def zeros(self, arguments: Any, value_size: int):
    """Zeros for a context and for rows that depend on `arguments`."""
    tiling = self.tiling
    zero = axes.varying_zero(arguments, self.dtype)
    context = (*tiling.leading, tiling.query_length, value_size)
    rows = (*self.row_leading, tiling.query_length)
    return jnp.broadcast_to(zero, context), jnp.broadcast_to(zero, rows)


def context_and_statistics(
  problem: Problem, captured: Captured, query, key, value
) -> tuple[jax.Array, Statistics]:
  """The context and the statistics of mapped tokens, padded to whole tiles."""
  tiling = problem.tiling
  columns, bounds = tiling.columns()
  context, rows = problem.zeros((captured, query, key, value), value.shape[-1])

  def row(outputs, inputs):
    start, bound = tuple(inputs[0]), inputs[1]
    query_tile = cut(query, start, tiling.row)

    def visit(masked, position, state):
      column = jnp.asarray(columns)[position]
      key_start, tile_start = (*start[:-1], column), (*start, column)

      def update(state):
        key_tile = cut(key, key_start, tiling.column)
        scores = problem.scores(
          captured, query_tile, key_tile, tile_start, masked=masked
        )
        tile = cut(value, key_start, tiling.column)
        return _updated(problem, captured, state, scores, tile, tile_start)

      if not masked or problem.occupied is None:
        return update(state)
      occupied = problem.occupied(captured.occupied, tile_start)
      return jax.lax.cond(occupied, update, lambda state: state, state)

    state = jax.tree.map(lambda each: cut(each, start, tiling.row), outputs)
    for part, masked in enumerate((False, True)):
      count, most = tiling.visits[part]
      if count is None:
        count = bound[part + 1] - bound[part]
      visit_part = functools.partial(visit, masked)
      state = _loop(visit_part, bound[part], count, most, state)
    summed, statistics = state
    statistics = _complete(problem.normalizer, statistics)
    tiles = summed / statistics.divisor[..., None], statistics
    return jax.tree.map(
      lambda array, tile: put(array, tile, start), outputs, tiles
    )

  maximum, total = without_keys(rows)
  maximum = jnp.maximum(maximum, problem.normalizer.smallest_maximum)
  outputs = context, Statistics(maximum, total)
  return scan(row, outputs, (tiling.rows(), bounds))


def _updated(problem, captured, state, scores, value, start):
  """The state after one more tile of keys."""
  context, (maximum, total) = state
  normalizer: OnlineNormalizer = problem.normalizer
  exponents = normalizer.exponents(scores)
  largest = jnp.maximum(maximum, jnp.max(exponents, axis=-1))
  # Inside a `scan`, JAX differentiates this code instead of the rule when it
  # differentiates a gradient.
  largest = jax.lax.stop_gradient(largest)
  shrink = jnp.exp(maximum - largest)
  numerators, parts = normalizer.terms(scores, largest[..., None])
  statistics = Statistics(largest, total * shrink + jnp.sum(parts, axis=-1))
  kept = problem.dropped(captured, numerators, start)
  seen = weighted_sum(kept, value, problem.dtype)
  return context * shrink[..., None] + seen, statistics


def _complete(normalizer, statistics: Statistics) -> Statistics:
  """The statistics after the last tile of keys."""
  if not normalizer.epsilon:
    return statistics
  return statistics._replace(total=statistics.total + normalizer.epsilon)


def _loop(body, start, count, most: int, state):
  """`body` for `count` numbers from `start` on; `count` is at most `most`."""
  # A loop of known length has a reverse mode. JAX needs it where it ignores the
  # rule of derivatives, see `_updated`.

  def step(number, state):
    if isinstance(count, int):
      return body(start + number, state)
    return jax.lax.cond(
      number < count, body, lambda _, state: state, start + number, state
    )

  if most == 1 and isinstance(count, int):
    return body(start, state)
  return jax.lax.fori_loop(0, most, step, state) if most else state
