"""Decoding in stages; the caches of a stage are twice as long as before.

The sources are also divided into twice as many parts, decoded one after the
other, the unfinished ones first. A part ends with the last of its sources.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from experiments.decoding.steps import Steps

# Smaller caches save less than the compilation of one more loop costs.
_MIN_CAPACITY = 16
# Smaller parts take as long as larger ones.
_MIN_ROWS = 12


class Stage(NamedTuple):
  """A part of decoding: the tokens its caches hold, and the carry's shapes."""

  capacity: int
  rows: int  # of a part of the batch
  carry: Any


def encode(
  steps: Steps, source: jax.Array, max_length: int, *, divide: bool = True
) -> tuple[Any, Any, list[Stage]]:
  """Encodes a source [B, S]; returns memory, first carry, and stages."""
  capacities = [max_length]
  while capacities[0] >= 2 * _MIN_CAPACITY:
    capacities.insert(0, -(-capacities[0] // 2))
  memory, carry = steps.start(source, capacities[0])
  rows = source.shape[0]
  stages = [Stage(capacities[0], rows, carry)]

  def shapes(rows: int, capacity: int):
    start = functools.partial(steps.start, source[:rows], capacity)
    return jax.eval_shape(start)[1]

  if capacities[1:] and _shapes(shapes(rows, max_length)) == _shapes(carry):
    return memory, carry, [Stage(max_length, rows, carry)]  # does not grow
  for capacity in capacities[1:]:
    rows = -(-rows // 2) if divide and rows >= 2 * _MIN_ROWS else rows
    stages.append(Stage(capacity, rows, shapes(rows, capacity)))
  return memory, carry, stages


def run_stages(
  steps: Steps,
  stages: list[Stage],
  unfinished: Callable[[Any], jax.Array],  # of a state: bool [B]
  extend: Callable[[Any, Any], Any],  # of memory and state
  memory: Any,
  state: Any,  # a named tuple with `length`, a number of tokens, and `carry`
) -> Any:
  """Runs `extend` on a state while it is unfinished, stage by stage."""
  for stage in stages:

    def run(memory, state, stage=stage):
      carry = jax.tree.map(_grown, state.carry, stage.carry)
      return jax.lax.while_loop(
        lambda state: (state.length < stage.capacity) & unfinished(state).any(),
        functools.partial(extend, memory),
        state._replace(carry=carry),
      )

    waits = unfinished(state)
    if stage.rows == len(waits):
      state = run(memory, state)
    else:
      state = _in_parts(steps, run, stage.rows, waits, memory, state)
  return state


def _in_parts(steps: Steps, run, rows: int, waits: jax.Array, memory, state):
  """Runs a stage on so many rows at a time, first those that wait for it."""
  order = jnp.argsort(~waits, stable=True)
  parts = -(-len(order) // rows)
  padding = (0, parts * rows - len(order))
  indices = jnp.pad(order, padding, mode="edge").reshape(parts, rows)

  def part(index):
    def taken(leaf, axis=0):
      return jnp.take(leaf, index, axis=axis) if leaf.ndim else leaf

    carry = jax.tree.map(lambda x: taken(x, steps.carry_axis), state.carry)
    others = jax.tree.map(taken, state._replace(carry=None))
    return run(jax.tree.map(taken, memory), others._replace(carry=carry))

  states = jax.lax.map(part, indices)
  places = jnp.argsort(order)

  def joined(leaf, axis=0):
    if leaf.ndim == 1:  # a number of tokens; finished parts may have fewer
      return leaf.max()
    leaf = jnp.moveaxis(leaf, 0, axis)
    shape = (*leaf.shape[:axis], parts * rows, *leaf.shape[axis + 2 :])
    return jnp.take(leaf.reshape(shape), places, axis=axis)

  carry = jax.tree.map(lambda x: joined(x, steps.carry_axis), states.carry)
  others = jax.tree.map(joined, states._replace(carry=None))
  return others._replace(carry=carry)


def _shapes(tree) -> list[tuple[int, ...]]:
  return [leaf.shape for leaf in jax.tree.leaves(tree)]


def _grown(array: jax.Array, like) -> jax.Array:
  """Pads with zeros, to the shape of `like`."""
  if like.shape == array.shape:
    return array
  return jnp.pad(array, [(0, b - a) for a, b in zip(array.shape, like.shape)])
