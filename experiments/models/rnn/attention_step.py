"""The attention of a recurrent decoder, as pure functions.

Axes: B batch, S source, T target, C context, Q query.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import attention
from attention.scores import Score, with_mapped_keys


class Memory(NamedTuple):
  """The encoder's result, constant during decoding."""

  keys: jax.Array  # [B, S, ...] encoder states, already mapped by the score
  values: jax.Array  # [B, S, C] encoder states
  mask: jax.Array  # [B, 1, S], False at padding
  summary: jax.Array  # [B, C], the fixed context vector


def attention_context(
  score: Score | None, memory: Memory, query: jax.Array
) -> jax.Array:
  """Returns the contexts [B, T, C] of queries [B, T, Q].

  See "Neural Machine Translation by Jointly Learning to Align and Translate",
  Bahdanau et al., 2014, equations 5 and 6 (https://arxiv.org/abs/1409.0473).
  Without a score, every context is the fixed context vector.
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


def attention_weights(
  score: Score | None, memory: Memory, query: jax.Array
) -> jax.Array:
  """Returns the attention weights [B, T, S] of queries [B, T, Q].

  See Bahdanau et al., 2014, equation 6. Without a score, all are zero.
  """
  if score is None:
    return jnp.zeros((*query.shape[:2], memory.values.shape[1]), jnp.float32)
  return attention.attention_weights(
    query,
    memory.keys,
    score=with_mapped_keys(score),
    mask=memory.mask,
  )
