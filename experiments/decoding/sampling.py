"""Answers whose tokens are chosen for good: the likeliest, or drawn.

Axes: B batch, S source, T target, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.data.batch import BOS, EOS, PAD
from experiments.decoding.cache_growth import encode, extended
from experiments.decoding.constraints import Constraints, constrained
from experiments.decoding.top_k import largest


class _Answers(NamedTuple):
  """Answers [B, T] after `length` tokens, the last of them `token` [B]."""

  length: jax.Array
  carry: Any
  token: jax.Array
  tokens: jax.Array
  ended: jax.Array


def greedy(
  model: nn.Module,
  params: Any,
  source: jax.Array,
  *,
  max_length: int,
  constraints: Constraints = Constraints(),  # noqa: B008
) -> jax.Array:
  """Decodes the likeliest token at every step, in a compiled loop.

  The loop ends when every sequence has ended.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids, padded with PAD.
    max_length: T, the number of tokens at most, EOS included.
    constraints: what an answer may not contain.

  Returns:
    [B, T] int32 token ids, PAD after EOS.

  Raises:
    AssertionError: if source is not of rank 2.
    ValueError: if the constraints do not fit; the message names the field.

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> source = jnp.array([[3, 4, 2]])
    >>> def answer(rng):
    ...   params = model.init(rng, source, source)["params"]
    ...   return greedy(model, params, source, max_length=5)
    >>> jax.eval_shape(answer, jax.random.key(0)).shape
    (1, 5)
  """

  def likeliest(logits, length):
    del length
    return largest(logits, 1)[1][..., 0]

  return _decoded(model, params, source, max_length, constraints, likeliest)


def sample(
  model: nn.Module,
  params: Any,
  source: jax.Array,
  rng: jax.Array,
  *,
  max_length: int,
  temperature: float = 1.0,
  top_k: int = 0,
  constraints: Constraints = Constraints(),  # noqa: B008
) -> jax.Array:
  """Draws answers from the model's distribution, token by token.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids, padded with PAD.
    rng: a random key.
    max_length: T, the number of tokens at most, EOS included.
    temperature: what logits are divided by; below 1 likely tokens become
      likelier.
    top_k: how many of the likeliest tokens to draw from; 0 for all.
    constraints: what an answer may not contain.

  Returns:
    [B, T] int32 token ids, PAD after EOS.

  Raises:
    AssertionError: if source is not of rank 2.
    ValueError: if a number is out of range; the message names it.

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> source = jnp.array([[3, 4, 2]])
    >>> def answer(rng):
    ...   params = model.init(rng, source, source)["params"]
    ...   return sample(model, params, source, rng, max_length=5, top_k=3)
    >>> jax.eval_shape(answer, jax.random.key(0)).shape
    (1, 5)
  """
  if not temperature > 0:
    raise ValueError(f"temperature must be positive, got {temperature}")
  if top_k < 0:
    raise ValueError(f"top_k must be at least 0, 0 for all, got {top_k}")

  def draw(logits, length):
    step_rng = jax.random.fold_in(rng, length)
    logits = logits / temperature
    if not 0 < top_k < logits.shape[-1]:
      return jax.random.categorical(step_rng, logits)
    logits, token = largest(logits, top_k)
    drawn = jax.random.categorical(step_rng, logits)
    return jnp.take_along_axis(token, drawn[:, None], axis=-1)[:, 0]

  return _decoded(model, params, source, max_length, constraints, draw)


def _decoded(
  model: nn.Module,
  params: Any,
  source: jax.Array,
  max_length: int,
  constraints: Constraints,
  choose: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
  """Decodes what `choose` makes of logits [B, V] and the tokens' number."""
  chex.assert_rank(source, 2, custom_message="source")
  variables = {"params": params}
  memory, carry, stages = encode(model, variables, source, max_length)

  def unfinished(answers: _Answers):
    return ~answers.ended.all()

  def extend(answers: _Answers):
    length, carry, token, tokens, ended = answers
    step: Any = model.apply(variables, memory, carry, token, method="step")
    carry, logits, _ = step
    logits = constrained(
      constraints, tokens, length, logits.astype(jnp.float32)
    )
    token = choose(logits, length).astype(jnp.int32)
    token = jnp.where(ended, PAD, token)
    tokens = tokens.at[:, length].set(token)
    # PAD, the first token, is what comes of nothing but -inf.
    ended = ended | (token == EOS) | (token == PAD)
    return _Answers(length + 1, carry, token, tokens, ended)

  batch_size = source.shape[0]
  begin = _Answers(
    jnp.zeros((), jnp.int32),
    carry,
    jnp.full((batch_size,), BOS, jnp.int32),
    jnp.full((batch_size, max_length), PAD, jnp.int32),
    # A row without a source, as in the last batch of a set, has ended.
    (source == PAD).all(-1),
  )
  return extended(stages, unfinished, extend, begin).tokens
