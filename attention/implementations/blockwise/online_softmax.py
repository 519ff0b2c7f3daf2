"""The online softmax: the context, one tile of keys after another.

See "Self-attention Does Not Need O(n^2) Memory", Rabe and Staats, 2021
(https://arxiv.org/abs/2112.05682). Other normalizers that are fractions of
exponentials (`OnlineNormalizer`) are computed in the same way.
"""

import functools

import jax
import jax.numpy as jnp

from attention.arrays.matmul import weighted_sum
from attention.arrays.softmax import Statistics, without_keys
from attention.implementations.blockwise.problem import Captured, Problem
from attention.implementations.blockwise.tiles import cut, put, scan
from attention.normalizers import OnlineNormalizer


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
    if epsilon := problem.normalizer.epsilon:
      statistics = statistics._replace(total=statistics.total + epsilon)
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
  terms = weighted_sum(kept, value, problem.dtype)
  return context * shrink[..., None] + terms, statistics


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
