"""Greedy search and sampling."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.data.batch import BOS, EOS, PAD
from experiments.decoding.cache_growth import encode, run_stages
from experiments.decoding.constraints import Constraints, constrained
from experiments.decoding.steps import make_steps
from experiments.decoding.top_k import largest


class _Predictions(NamedTuple):
  """Predictions [B, T] after `length` tokens, the last of them `token` [B]."""

  length: jax.Array
  carry: Any
  token: jax.Array
  tokens: jax.Array
  ended: jax.Array
  limits: jax.Array  # [B] largest number of tokens


def greedy(
  model: nn.Module,
  params: Any,
  source: jax.Array,
  *,
  max_length: int,
  constraints: Constraints = Constraints(),  # noqa: B008
  limits: jax.Array | None = None,
) -> jax.Array:
  """Decodes the most likely token at every step, in a compiled loop.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids, padded with PAD.
    max_length: T, the largest number of tokens, EOS included.
    constraints: on the predictions.
    limits: [B] largest number of tokens for each source, at most T; None for T.

  Returns:
    [B, T] int32 token ids, PAD after EOS.

  Raises:
    ValueError: if the constraints do not fit; the message names the field.

  Example:
    >>> from experiments.config import Seq2SeqConfig
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(Seq2SeqConfig(), 9, 9, 8, "float32")
    >>> source = jnp.array([[3, 4, 2]])
    >>> def prediction(rng):
    ...   params = model.init(rng, source, source)["params"]
    ...   return greedy(model, params, source, max_length=5)
    >>> jax.eval_shape(prediction, jax.random.key(0)).shape
    (1, 5)
  """

  def most_likely(logits, length):
    del length
    return largest(logits, 1)[1][..., 0]

  return _decoded(
    model, params, source, max_length, constraints, limits, most_likely
  )


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
  limits: jax.Array | None = None,
) -> jax.Array:
  """Samples predictions from the model's distribution, token by token.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids, padded with PAD.
    rng: a random key.
    max_length: T, the largest number of tokens, EOS included.
    temperature: divisor of the logits; values below 1 prefer likely tokens.
    top_k: sample from the k most likely tokens; 0 for all.
    constraints: on the predictions.
    limits: [B] largest number of tokens for each source, at most T; None for T.

  Returns:
    [B, T] int32 token ids, PAD after EOS.

  Raises:
    ValueError: if a number is out of range; the message names it.

  Example:
    >>> from experiments.config import Seq2SeqConfig
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(Seq2SeqConfig(), 9, 9, 8, "float32")
    >>> source = jnp.array([[3, 4, 2]])
    >>> def prediction(rng):
    ...   params = model.init(rng, source, source)["params"]
    ...   return sample(model, params, source, rng, max_length=5, top_k=3)
    >>> jax.eval_shape(prediction, jax.random.key(0)).shape
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

  # The random numbers of a source depend on its row.
  return _decoded(
    model, params, source, max_length, constraints, limits, draw, divide=False
  )


def _decoded(
  model: nn.Module,
  params: Any,
  source: jax.Array,
  max_length: int,
  constraints: Constraints,
  limits: jax.Array | None,
  choose: Callable[[jax.Array, jax.Array], jax.Array],
  *,
  divide: bool = True,  # whether the result of a source ignores the others
) -> jax.Array:
  """Decodes tokens that `choose` selects from logits [B, V] and the length."""
  chex.assert_rank(source, 2, custom_message="source")
  steps = make_steps(model, params, beam_size=1)
  memory, carry, stages = encode(steps, source, max_length, divide=divide)
  steps = steps.prepared(memory, carry, source.shape[0])

  def extend(memory, state: _Predictions):
    length, carry, token, tokens, ended, limits = state
    carry, logits = steps.step(memory, carry, token[:, None], None)
    logits = constrained(constraints, tokens, length, logits[0])
    token = choose(logits, length).astype(jnp.int32)
    token = jnp.where(ended, PAD, token)
    tokens = tokens.at[:, length].set(token)
    # The result is PAD, the first token, if all logits are -inf.
    length = length + 1
    ended = ended | (token == EOS) | (token == PAD) | (length >= limits)
    return _Predictions(length, carry, token, tokens, ended, limits)

  initial = _initial_predictions(carry, source, max_length)
  if limits is not None:
    initial = initial._replace(limits=limits)
  final = run_stages(
    steps, stages, lambda state: ~state.ended, extend, memory, initial
  )
  return final.tokens


def _initial_predictions(
  carry: Any, source: jax.Array, max_length: int
) -> _Predictions:
  batch_size = source.shape[0]
  return _Predictions(
    jnp.zeros((), jnp.int32),
    carry,
    jnp.full((batch_size,), BOS, jnp.int32),
    jnp.full((batch_size, max_length), PAD, jnp.int32),
    # A row without a source, as in the last batch, has ended.
    (source == PAD).all(-1),
    jnp.full((batch_size,), max_length, jnp.int32),
  )
