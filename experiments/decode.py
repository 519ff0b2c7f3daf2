"""Decoding: from a source to a target, one token after the other.

Works on any model with `start(source, max_length) -> memory, carry` and
`step(memory, carry, token) -> carry, logits, weights`.

Axes: B batch, S source, T target, P panels (heads) of attention weights.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.data.batch import BOS, EOS, PAD


def greedy(
  model: nn.Module, params: Any, source: jax.Array, *, max_length: int
) -> jax.Array:
  """Decodes the likeliest token at every step, in one compiled loop.

  The loop ends when every sequence has ended.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids, padded with PAD.
    max_length: T, the number of tokens at most, EOS included.

  Returns:
    [B, T] int32 token ids, PAD after EOS.

  Raises:
    AssertionError: if source is not of rank 2.

  Example:
    >>> from experiments.models.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> source = jnp.array([[3, 4, 2]])
    >>> def answer(rng):
    ...   params = model.init(rng, source, source)["params"]
    ...   return greedy(model, params, source, max_length=5)
    >>> jax.eval_shape(answer, jax.random.key(0)).shape
    (1, 5)
  """
  chex.assert_rank(source, 2, custom_message="source")
  variables = {"params": params}
  start: Any = model.apply(variables, source, max_length, method="start")
  memory, carry = start
  batch_size = source.shape[0]

  def unfinished(loop):
    length, _, _, _, ended = loop
    return (length < max_length) & ~ended.all()

  def extend(loop):
    length, carry, token, tokens, ended = loop
    step: Any = model.apply(variables, memory, carry, token, method="step")
    carry, logits, _ = step
    # PAD and BOS are never an answer.
    logits = logits.at[:, jnp.array([PAD, BOS])].set(-jnp.inf)
    token = jnp.where(ended, PAD, logits.argmax(-1).astype(jnp.int32))
    tokens = tokens.at[:, length].set(token)
    return length + 1, carry, token, tokens, ended | (token == EOS)

  begin = (
    jnp.zeros((), jnp.int32),
    carry,
    jnp.full((batch_size,), BOS, jnp.int32),
    jnp.full((batch_size, max_length), PAD, jnp.int32),
    # A row without a source, as in the last batch of a set, has ended.
    (source == PAD).all(-1),
  )
  _, _, _, tokens, _ = jax.lax.while_loop(unfinished, extend, begin)
  return tokens


def alignments(
  model: nn.Module, params: Any, source: jax.Array, target: jax.Array
) -> jax.Array:
  """Follows a given target and returns where each of its tokens looked.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids.
    target: [B, T] token ids.

  Returns:
    [B, P, T, S] attention weights, one panel a head.

  Raises:
    AssertionError: if source or target is not of rank 2.

  Example:
    >>> from experiments.models.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> source, target = jnp.array([[3, 4, 2]]), jnp.array([[4, 2]])
    >>> def look(rng):
    ...   params = model.init(rng, source, target)["params"]
    ...   return alignments(model, params, source, target)
    >>> jax.eval_shape(look, jax.random.key(0)).shape
    (1, 1, 2, 3)
  """
  chex.assert_rank([source, target], 2, custom_message="source, target")
  variables = {"params": params}
  start: Any = model.apply(variables, source, target.shape[1], method="start")
  memory, carry = start

  def follow(carry, token):
    step: Any = model.apply(variables, memory, carry, token, method="step")
    carry, _, weights = step
    return carry, weights

  inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
  _, weights = jax.lax.scan(follow, carry, inputs.T)
  return weights.transpose(1, 2, 0, 3)
