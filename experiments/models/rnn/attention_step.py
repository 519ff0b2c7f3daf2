"""The decoder's look back at the encoder states, as pure functions.

Axes: B batch, S source, T target, C context, Q query.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import attention
from attention.scores import Score, with_mapped_keys


class Memory(NamedTuple):
  """What the decoder may look back at; the same at every step.

  Attributes:
    keys: [B, S, ...] encoder states, already mapped by the score.
    values: [B, S, C] encoder states.
    mask: [B, 1, S], False at padding.
    summary: [B, C], the fixed context vector.
  """

  keys: jax.Array
  values: jax.Array
  mask: jax.Array
  summary: jax.Array


def look_back(
  score: Score | None, memory: Memory, query: jax.Array
) -> jax.Array:
  """Returns the contexts of queries: score, softmax, weighted sum.

  See "Neural Machine Translation by Jointly Learning to Align and Translate",
  Bahdanau et al., 2014, equations 5 and 6 (https://arxiv.org/abs/1409.0473).

  Args:
    score: bound, or None for a fixed context vector.
    memory: the encoder's states.
    query: [B, T, Q].

  Returns:
    [B, T, C]; without a score, the fixed context vector T times.

  Example:
    >>> from attention.scores import dot
    >>> states = jnp.ones((1, 3, 2))
    >>> memory = Memory(states, states, jnp.ones((1, 1, 3), bool), states[:, 0])
    >>> look_back(dot(), memory, jnp.ones((1, 4, 2))).shape
    (1, 4, 2)
  """
  if score is None:
    fixed = memory.summary[:, None, :]
    return jnp.broadcast_to(fixed, (*query.shape[:2], fixed.shape[-1]))
  return attention.attend(
    query,
    memory.keys,
    memory.values,
    score=with_mapped_keys(score),
    mask=memory.mask,
  )


def alignment(
  score: Score | None, memory: Memory, query: jax.Array
) -> jax.Array:
  """Returns where queries look, the weights of `look_back`.

  See "Neural Machine Translation by Jointly Learning to Align and Translate",
  Bahdanau et al., 2014, equation 6 (https://arxiv.org/abs/1409.0473).

  Args:
    score: bound, or None for a fixed context vector.
    memory: the encoder's states.
    query: [B, T, Q].

  Returns:
    [B, T, S] attention weights; without a score, zeros.

  Example:
    >>> from attention.scores import dot
    >>> states = jnp.ones((1, 3, 2))
    >>> memory = Memory(states, states, jnp.ones((1, 1, 3), bool), states[:, 0])
    >>> alignment(dot(), memory, jnp.ones((1, 4, 2))).shape
    (1, 4, 3)
  """
  if score is None:
    return jnp.zeros((*query.shape[:2], memory.values.shape[1]), jnp.float32)
  return attention.attention_weights(
    query,
    memory.keys,
    score=with_mapped_keys(score),
    mask=memory.mask,
  )
