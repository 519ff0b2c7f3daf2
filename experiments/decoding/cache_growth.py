"""Decoding in stages, for caches to grow with the answers.

A step attends to the whole of a cache, and a beam search moves the whole of
it, free positions too. So an answer begins with little room, and gets twice as
much when that is full: short answers cost the same whatever `max_length` is.

Axes: B batch, S source.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

# Smaller caches gain less than one more loop costs to compile.
_LEAST_ROOM = 16


class Stage(NamedTuple):
  """A part of decoding, with caches of one size.

  Attributes:
    room: how many tokens fit.
    carry: what a model with that room carries, or its shapes.
  """

  room: int
  carry: Any


def encode(
  model: nn.Module, variables: Any, source: jax.Array, max_length: int
) -> tuple[Any, Any, list[Stage]]:
  """Encodes a source for decoding in stages.

  Args:
    model: the model.
    variables: its variables.
    source: [B, S] token ids, padded with PAD.
    max_length: the number of tokens at most.

  Returns:
    What every step reads, what the first step starts from, with the room of
    the first stage, and the stages; one, if what the model carries does not
    grow.

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> source = jnp.array([[3, 4, 2]])
    >>> variables = model.init(jax.random.key(0), source, source)
    >>> memory, carry, stages = encode(model, variables, source, 50)
    >>> [stage.room for stage in stages]
    [50]
  """

  def start(room: int) -> Any:
    return model.apply(variables, source, room, method="start")

  rooms = [max_length]
  while rooms[0] >= 2 * _LEAST_ROOM:
    rooms.insert(0, -(-rooms[0] // 2))
  memory, carry = start(rooms[0])
  stages = [Stage(rooms[0], carry)]
  for room in rooms[1:]:
    _, shapes = jax.eval_shape(functools.partial(start, room))
    stages.append(Stage(room, shapes))
  if _shapes(stages[-1].carry) == _shapes(carry):
    stages = [Stage(max_length, carry)]
  return memory, carry, stages


def extended(
  stages: list[Stage],
  unfinished: Callable[[Any], jax.Array],
  extend: Callable[[Any], Any],
  state: Any,
) -> Any:
  """Extends a state while it is unfinished and there is room.

  Args:
    stages: from `encode`.
    unfinished: whether a state is to be extended, given room.
    extend: makes of a state one with a token more.
    state: a named tuple with `length`, the number of tokens so far, and
      `carry`, whose arrays may have axes before those of the model.

  Returns:
    The last state.

  Example:
    >>> class Count(NamedTuple):
    ...   length: jax.Array
    ...   carry: jax.Array
    >>> extended(
    ...   [Stage(2, jnp.ones(2)), Stage(4, jnp.ones(4))],
    ...   lambda count: count.length < 3,
    ...   lambda count: Count(count.length + 1, count.carry + 1),
    ...   Count(jnp.array(0), jnp.zeros(2)),
    ... )
    Count(length=Array(3, ...), carry=Array([3., 3., 1., 1.], dtype=float32))
  """
  for stage in stages:

    def go_on(state, room=stage.room):
      return (state.length < room) & unfinished(state)

    state = state._replace(carry=jax.tree.map(_grown, state.carry, stage.carry))
    state = jax.lax.while_loop(go_on, extend, state)
  return state


def _shapes(tree) -> list[tuple[int, ...]]:
  return [leaf.shape for leaf in jax.tree.leaves(tree)]


def _grown(array: jax.Array, like) -> jax.Array:
  """Pads the last axes with zeros, as free positions of a cache are."""
  shape = (*array.shape[: array.ndim - like.ndim], *like.shape)
  if shape == array.shape:
    return array
  return jnp.pad(array, [(0, b - a) for a, b in zip(array.shape, shape)])
