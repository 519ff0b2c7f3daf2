"""Decoding in stages; the caches of a stage are twice as long as before."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Smaller caches save less than the compilation of one more loop costs.
_MIN_ROOM = 16


class Stage(NamedTuple):
  """A part of decoding: the tokens its caches hold, and the carry's shapes."""

  room: int
  carry: Any


def encode(
  start: Callable[[jax.Array, int], tuple[Any, Any]],
  source: jax.Array,
  max_length: int,
) -> tuple[Any, Any, list[Stage]]:
  """Encodes a source [B, S]; returns memory, first carry, and stages."""
  rooms = [max_length]
  while rooms[0] >= 2 * _MIN_ROOM:
    rooms.insert(0, -(-rooms[0] // 2))
  memory, carry = start(source, rooms[0])
  stages = [Stage(rooms[0], carry)]
  for room in rooms[1:]:
    _, shapes = jax.eval_shape(functools.partial(start, source, room))
    stages.append(Stage(room, shapes))
  if _shapes(stages[-1].carry) == _shapes(carry):  # which does not grow
    stages = [Stage(max_length, carry)]
  return memory, carry, stages


def extended(
  stages: list[Stage],
  unfinished: Callable[[Any], jax.Array],
  extend: Callable[[Any], Any],
  state: Any,  # a named tuple with `length`, a number of tokens, and `carry`
) -> Any:
  """Runs `extend` on a state while it is unfinished, stage by stage."""
  for stage in stages:

    def continues(state, room=stage.room):
      return (state.length < room) & unfinished(state)

    state = state._replace(carry=jax.tree.map(_grown, state.carry, stage.carry))
    state = jax.lax.while_loop(continues, extend, state)
  return state


def _shapes(tree) -> list[tuple[int, ...]]:
  return [leaf.shape for leaf in jax.tree.leaves(tree)]


def _grown(array: jax.Array, like) -> jax.Array:
  """Pads with zeros, to the shape of `like`."""
  if like.shape == array.shape:
    return array
  return jnp.pad(array, [(0, b - a) for a, b in zip(array.shape, like.shape)])
