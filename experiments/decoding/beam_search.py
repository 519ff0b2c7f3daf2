"""Beam search.

Axes: B batch, K beams, N best, S source, T target, V vocabulary, C candidates
of a beam.
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.data.batch import BOS, EOS, PAD
from experiments.decoding.cache_growth import encode, run_stages
from experiments.decoding.constraints import Constraints, constrained
from experiments.decoding.steps import Steps, make_steps
from experiments.decoding.top_k import largest


class Hypotheses(NamedTuple):
  """The best hypotheses of each source, best first.

  Attributes:
    tokens: [B, N, T] int32 token ids, PAD after EOS.
    scores: [B, N], -inf (and only PAD) where there are fewer hypotheses.
    log_probs: [B, N], log-probability of the whole hypothesis.
  """

  tokens: jax.Array
  scores: jax.Array
  log_probs: jax.Array


class _Search(NamedTuple):
  """The unfinished hypotheses and the best finished ones."""

  length: jax.Array  # number of tokens so far
  carry: Any
  parent: jax.Array  # [B, K] the hypotheses of `carry` that these continue
  token: jax.Array  # [B, K] last tokens, at first BOS
  tokens: jax.Array  # [B, K, T]
  log_probs: jax.Array  # [B, K], -inf where a beam is empty
  finished: Hypotheses
  limits: jax.Array  # [B] largest number of tokens


def beam(
  model: nn.Module,
  params: Any,
  source: jax.Array,
  *,
  max_length: int,
  beam_size: int,
  n_best: int = 1,
  length_penalty: float = 1.0,
  constraints: Constraints = Constraints(),  # noqa: B008
  limits: jax.Array | None = None,
) -> Hypotheses:
  """Searches the hypotheses with the best scores, in a compiled loop.

  A hypothesis of n tokens, EOS included, scores log p / ((5 + n) / 6)^alpha.
  See "Google's Neural Machine Translation System", Wu et al., 2016, equation
  14 (https://arxiv.org/abs/1609.08144). Every step keeps the K most likely
  continuations of a source's hypotheses; those with EOS, and those of
  as many tokens as allowed, are finished and free their beams. A single beam
  gives the result of `greedy`.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids, padded with PAD.
    max_length: T, the largest number of tokens, EOS included.
    beam_size: K.
    n_best: N, at most K.
    length_penalty: alpha; 0 for none, larger values prefer long hypotheses.
    constraints: on the hypotheses.
    limits: [B] largest number of tokens for each source, at most T; None for T.

  Returns:
    The N best hypotheses of each source.

  Raises:
    ValueError: if a number is out of range; the message names it.

  Example:
    >>> from experiments.config import Seq2SeqConfig
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(Seq2SeqConfig(), 9, 9, 8, "float32")
    >>> source = jnp.array([[3, 4, 2]])
    >>> def hypotheses(rng):
    ...   params = model.init(rng, source, source)["params"]
    ...   return beam(
    ...     model, params, source, max_length=5, beam_size=4, n_best=2
    ...   )
    >>> jax.eval_shape(hypotheses, jax.random.key(0)).tokens.shape
    (1, 2, 5)
  """
  chex.assert_rank(source, 2, custom_message="source")
  if not 1 <= n_best <= beam_size:
    raise ValueError(
      f"n_best must be from 1 to beam_size={beam_size}, got {n_best}"
    )
  if not length_penalty >= 0:
    raise ValueError(f"length_penalty must be at least 0, got {length_penalty}")
  steps = make_steps(model, params, beam_size)
  memory, carry, stages = encode(steps, source, max_length)
  steps = steps.prepared(memory, carry, source.shape[0])
  divisors = jnp.asarray(
    ((5 + np.arange(max_length + 1)) / 6) ** length_penalty, jnp.float32
  )

  def unfinished(search: _Search):
    # No continuation has a larger log p <= 0 or a larger divisor.
    bound = search.log_probs.max(-1) / divisors[search.limits]
    return ~(search.finished.scores[:, -1] >= bound)

  extend = functools.partial(_extended, steps, constraints, divisors)
  initial = _initial_search(carry, source, max_length, beam_size, n_best)
  if limits is not None:
    initial = initial._replace(limits=limits)
  final = run_stages(steps, stages, unfinished, extend, memory, initial)
  return final.finished


def _initial_search(
  carry, source, max_length: int, beam_size: int, n_best: int
):
  """Returns a search before its first step: one empty hypothesis a source."""
  batch_size = source.shape[0]
  # A row without a source, as in the last batch, has no hypothesis.
  empty = (source == PAD).all(-1, keepdims=True)
  first = (jnp.arange(beam_size) == 0)[None]
  no_scores = jnp.full((batch_size, n_best), -jnp.inf, jnp.float32)
  return _Search(
    jnp.zeros((), jnp.int32),
    carry,
    jnp.zeros((batch_size, beam_size), jnp.int32),
    jnp.full((batch_size, beam_size), BOS, jnp.int32),
    jnp.full((batch_size, beam_size, max_length), PAD, jnp.int32),
    jnp.where(first & ~empty, 0.0, -jnp.inf).astype(jnp.float32),
    Hypotheses(
      jnp.full((batch_size, n_best, max_length), PAD, jnp.int32),
      no_scores,
      no_scores,
    ),
    jnp.full((batch_size,), max_length, jnp.int32),
  )


def _extended(
  steps: Steps,
  constraints: Constraints,
  divisors: jax.Array,  # [T + 1], of log p, by the number of tokens
  memory: Any,
  search: _Search,
) -> _Search:
  """Extends every unfinished hypothesis by a token."""
  length, tokens = search.length, search.tokens
  carry, logits = steps.step(memory, search.carry, search.token, search.parent)
  parent, token, log_probs = _top_continuations(
    constraints, tokens, length, search.log_probs, logits
  )
  tokens = jnp.take_along_axis(tokens, parent[..., None], axis=1)
  tokens = tokens.at[:, :, length].set(token)
  last = length + 1 >= search.limits[:, None]
  ended = (token == EOS) | (token == PAD) | last
  # PAD stands for the absence of a token.
  scores = log_probs / divisors[length + (token != PAD)]
  scores = jnp.where(ended, scores, -jnp.inf)
  return _Search(
    length + 1,
    carry,
    parent,
    token,
    tokens,
    jnp.where(ended, -jnp.inf, log_probs),
    _best(search.finished, Hypotheses(tokens, scores, log_probs)),
    search.limits,
  )


def _top_continuations(
  constraints: Constraints,
  tokens: jax.Array,
  length: jax.Array,
  log_probs: jax.Array,
  logits: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the K most likely continuations: parent, token, log p, [B, K]."""
  beam_size, batch_size, vocabulary_size = logits.shape
  allowed = constrained(constraints, tokens.swapaxes(0, 1), length, logits)
  count = min(beam_size, vocabulary_size)
  # By logits, because different logits can have equal log-probabilities in
  # floating point, and a single beam must choose the tokens of `greedy`.
  chosen, token = largest(allowed, count)
  chosen = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  # A hypothesis without an allowed continuation ends with PAD, at no cost.
  first = chosen[..., 0]
  chosen = chosen.at[..., 0].set(jnp.where(jnp.isneginf(first), 0.0, first))
  # [K, B, C] to [B, K, C].
  total = log_probs[..., None] + chosen.swapaxes(0, 1)
  total, index = jax.lax.top_k(total.reshape(batch_size, -1), beam_size)
  token = token.swapaxes(0, 1).reshape(batch_size, -1)
  token = jnp.take_along_axis(token, index, axis=-1)
  return index // count, token, total


def _best(old: Hypotheses, new: Hypotheses) -> Hypotheses:
  """Returns the best of both, as many as `old`; of equals, the old first."""
  tokens, scores, log_probs = (
    jnp.concatenate(pair, axis=1) for pair in zip(old, new)
  )
  scores, index = jax.lax.top_k(scores, old.scores.shape[1])
  return Hypotheses(
    jnp.take_along_axis(tokens, index[..., None], axis=1),
    scores,
    jnp.take_along_axis(log_probs, index, axis=1),
  )
