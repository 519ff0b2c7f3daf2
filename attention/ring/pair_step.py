"""Attention for one pair of a query block and a key block.

Axes: c chunks per device, m blocks per chunk, t queries and s keys of a block.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention.arrays import axes
from attention.arrays.softmax import Statistics, without_keys
from attention.implementations.closure import without_captured
from attention.positional.base import EMPTY, FULL
from attention.ring.layout import Ring, get, may_have_gradient

_CAPTURED = (
  "A score that is a plain function cannot capture replicated arrays; make "
  "them arguments, ring_attention(..., score=jax.tree_util.Partial(function, "
  "array)), or attributes of an attention.scores.Score."
)
_FIRST = {-4: 0, -3: 0}


def as_result(arrays: Sequence[jax.Array]) -> tuple[jax.Array, Statistics]:
  """The context [..., t, E] and statistics [..., t] of [..., t, 1]."""
  context, *statistics = arrays
  return context, Statistics(*(each[..., 0] for each in statistics))


class Constants(NamedTuple):
  """Arrays without a gradient: those that `PairSteps`' functions capture."""

  single: Any
  combined: Any
  # The results of no keys: [..., c, m, t, E] and [..., c, m, t, 1].
  empty: list[jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class PairSteps:
  """Functions of a pair of blocks, for each case, PARTIAL or FULL."""

  visible: np.ndarray  # EMPTY, PARTIAL or FULL, for each pair of blocks
  # (case, constants, query, key, value, row, column) -> context and statistics
  single: Callable
  # (case, parameters, constants, query, key, value, row, column, context,
  # statistics) -> the given result over all keys, with the derivatives of this
  # key block; see `Request.combined`
  combined: Callable

  def add(self, make: Callable, total, numbers, *arguments):
    """make(case)(total, *arguments, *numbers), or the total if EMPTY."""

    def branch(case):
      return (lambda total, *_: total) if case == EMPTY else make(case)

    cases = [int(case) for case in np.unique(self.visible)]
    operands = (total, *arguments, *numbers)
    if len(cases) == 1:
      return branch(cases[0])(*operands)
    branches = np.searchsorted(cases, self.visible).astype(np.int32)
    chosen = jnp.asarray(branches)[numbers]
    return jax.lax.switch(chosen, [branch(case) for case in cases], *operands)


def make_pair_steps(
  ring: Ring,
  visible: np.ndarray,
  # (case, query, key, value, row, column[, combined]) -> context, statistics
  pair: Callable,
  blocks,
) -> tuple[PairSteps, Any, Constants]:
  """Separates `pair` into pure functions and the arrays that it captures."""
  number = jax.lax.axis_index(ring.axis_name)
  example = (*(get(each, _FIRST) for each in blocks), number, number)
  cases = {*map(int, np.unique(visible)), FULL} - {EMPTY}
  single, captured = _pure(pair, cases, *example)
  shapes = jax.eval_shape(functools.partial(pair, FULL), *example)
  empty = _empty(ring, shapes, (captured, blocks))
  first = as_result([get(each, _FIRST) for each in empty])
  combined, all_captured = _pure(pair, cases, *example, *first)
  parameters, others = _partition(all_captured, ring)

  def single_pair(case, constants, *arguments):
    return single[case](constants.single[case], *arguments)

  def combined_pair(case, parameters, constants, *arguments):
    own = _joined(parameters, constants.combined)[case]
    return combined[case](own, *arguments)

  steps = PairSteps(visible, single_pair, combined_pair)
  return steps, parameters, Constants(captured, others, empty)


def _pure(pair: Callable, cases, *example):
  """Functions by case, and the arrays that they capture, by case."""
  pure = {
    case: without_captured(functools.partial(pair, case), *example)
    for case in cases
  }
  functions = {case: function for case, (function, _) in pure.items()}
  return functions, {case: captured for case, (_, captured) in pure.items()}


def _empty(ring: Ring, shapes, arguments) -> list[jax.Array]:
  """The results of no keys for all query blocks of a device."""
  context, statistics = shapes
  zero = axes.varying_zero(arguments, statistics.total.dtype)
  layout = ring.queries
  blocks = (layout.chunks, layout.blocks_per_chunk, layout.size)
  shape = (*context.shape[:-2], *blocks)
  return [
    jnp.full((*shape, context.shape[-1]), zero),
    *without_keys(jnp.full((*shape, 1), zero)),
  ]


def _partition(captured, ring: Ring):
  """The arrays with a gradient and the others; absent arrays are None."""

  def parameter(leaf):
    if not may_have_gradient(leaf):
      return None
    if jax.typeof(leaf) != jax.typeof(ring.varying(leaf)):
      raise ValueError(_CAPTURED)
    return leaf

  def constant(leaf):
    return None if may_have_gradient(leaf) else leaf

  return jax.tree.map(parameter, captured), jax.tree.map(constant, captured)


def _joined(parameters, constants):
  """Undoes `_partition`."""
  return jax.tree.map(
    lambda left, right: right if left is None else left,
    parameters,
    constants,
    is_leaf=lambda leaf: leaf is None,
  )
