"""What a piece of queries finds in a piece of keys, wherever these come from.

Axes: c chunks of the sequence a device, m pieces of a chunk, t queries and s
keys of a piece.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.implementations.blockwise.closure import without_captured
from attention.positional import EMPTY, FULL
from attention.ring.layout import Ring, get, may_have_gradient

_CAPTURED = (
  "A score that is a plain function cannot capture arrays that all devices "
  "have alike; make them arguments, ring_attention(..., score=jax.tree_util."
  "Partial(function, array)), or attributes of an attention.scores.Score."
)
_FIRST = {-4: 0, -3: 0}


class Constants(NamedTuple):
  """Arrays that no gradient is asked for.

  Attributes:
    alone: what the functions of a part alone capture.
    of_whole: what those of a part of a whole capture beside parameters.
    nothing: contexts [..., c, m, t, E] and lses [..., c, m, t, 1] before any
      keys, varying over devices as what is found will.
  """

  alone: Any
  of_whole: Any
  nothing: list[jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
  """Functions of two pieces, for each way in which one may see the other.

  Attributes:
    table: EMPTY, PARTIAL or FULL for all pairs of pieces of the sequence.
    alone: (case, constants, query, key, value, row, column) -> context and lse
      of a piece of queries over a piece of keys.
    of_whole: (case, parameters, constants, query, key, value, row, column,
      context, lse) -> these two, found over all keys; with the part of their
      derivatives that this piece of keys has.
  """

  table: np.ndarray
  alone: Callable
  of_whole: Callable

  def add(self, make: Callable, total, numbers, *arguments):
    """make(case)(total, *arguments, *numbers); of what is EMPTY, the total."""

    def branch(case):
      return (lambda total, *_: total) if case == EMPTY else make(case)

    cases = [int(case) for case in np.unique(self.table)]
    operands = (total, *arguments, *numbers)
    if len(cases) == 1:
      return branch(cases[0])(*operands)
    branches = np.searchsorted(cases, self.table).astype(np.int32)
    chosen = jnp.asarray(branches)[numbers]
    return jax.lax.switch(chosen, [branch(case) for case in cases], *operands)


def make_parts(
  ring: Ring, table: np.ndarray, part: Callable, pieces
) -> tuple[Parts, list[Any], Constants]:
  """Makes the functions, and apart from them the arrays they capture.

  Args:
    ring: the devices.
    table: of all pairs of pieces.
    part: (case, query, key, value, row, column[, context, lse]) -> context and
      lse of two pieces; given those of all keys it returns them.
    pieces: query, key and value, [..., c, m, t, D] or [..., c, m, s, D].

  Returns:
    The functions, the arrays with a gradient, and the others.

  Raises:
    ValueError: if gradients would have to be summed over the devices while
      these do different things.
  """
  number = jax.lax.axis_index(ring.axis_name)
  example = (*(get(each, _FIRST) for each in pieces), number, number)
  cases = {*map(int, np.unique(table)), FULL} - {EMPTY}
  alone, captured = _pure(part, cases, *example)
  shapes = jax.eval_shape(functools.partial(part, FULL), *example)
  nothing = _nothing(ring, shapes, (captured, pieces))
  context, lse = (get(each, _FIRST) for each in nothing)
  of_whole, all_captured = _pure(part, cases, *example, context, lse[..., 0])
  parameters, others, joined = _apart(all_captured, ring)

  def part_alone(case, constants, *arguments):
    return alone[case](constants.alone[case], *arguments)

  def part_of_whole(case, parameters, constants, *arguments):
    own = joined(parameters, constants.of_whole)[case]
    return of_whole[case](own, *arguments)

  parts = Parts(table, part_alone, part_of_whole)
  return parts, parameters, Constants(captured, others, nothing)


def _pure(part: Callable, cases, *example):
  """Functions by case, and what they capture."""
  pairs = {
    case: without_captured(functools.partial(part, case), *example)
    for case in cases
  }
  functions = {case: function for case, (function, _) in pairs.items()}
  return functions, {case: captured for case, (_, captured) in pairs.items()}


def _nothing(ring: Ring, shapes, arguments) -> list[jax.Array]:
  """Contexts and lses before any keys, for pieces of these shapes."""
  context, lse = shapes
  zero = axes.varying_zero(arguments, lse.dtype)
  shape = (*lse.shape[:-1], ring.own.chunks, ring.own.each, ring.own.size)
  return [
    jnp.full((*shape, context.shape[-1]), zero),
    jnp.full((*shape, 1), zero - jnp.inf),
  ]


def _apart(captured, ring: Ring):
  """The arrays with a gradient, the others, and how to put them together."""
  leaves, tree = jax.tree.flatten(captured)
  is_parameter = list(map(may_have_gradient, leaves))
  for leaf, has in zip(leaves, is_parameter):
    if has and jax.typeof(leaf) != jax.typeof(ring.varying(leaf)):
      raise ValueError(_CAPTURED)

  def joined(parameters, constants):
    sources = {True: iter(parameters), False: iter(constants)}
    return jax.tree.unflatten(
      tree, [next(sources[has]) for has in is_parameter]
    )

  parameters, constants = (
    [leaf for leaf, has in zip(leaves, is_parameter) if has is kind]
    for kind in (True, False)
  )
  return parameters, constants, joined
