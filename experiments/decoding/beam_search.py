"""Beam search: the best answers of many that are followed at once.

Axes: B batch, K beams, N best, S source, T target, V vocabulary, C candidates
of a beam. What a model carries has its beams in front, [K, B, ...], where a
step is fastest.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.data.batch import BOS, EOS, PAD
from experiments.decoding.cache_growth import encode, extended
from experiments.decoding.constraints import Constraints, constrained
from experiments.decoding.top_k import largest


class Hypotheses(NamedTuple):
  """Answers of each sentence, best first.

  Attributes:
    tokens: [B, N, T] int32 token ids, PAD after EOS.
    scores: [B, N], -inf (and nothing but PAD) where fewer answers exist.
    log_probs: [B, N], of the whole answer under the model.
  """

  tokens: jax.Array
  scores: jax.Array
  log_probs: jax.Array


class _Search(NamedTuple):
  """Where a search stands, after `length` tokens.

  The answers that go on are `tokens` [B, K, T], `token` [B, K] the last of
  each, at first BOS, and `log_probs` [B, K], -inf where a beam is empty.
  `found` are the best that have ended.
  """

  length: jax.Array
  carry: Any
  token: jax.Array
  tokens: jax.Array
  log_probs: jax.Array
  found: Hypotheses


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
) -> Hypotheses:
  """Searches the answers of the best score, in a compiled loop.

  An answer of n tokens, EOS among them, scores log p / ((5 + n) / 6)^alpha.
  See "Google's Neural Machine Translation System", Wu et al., 2016, equation
  14 (https://arxiv.org/abs/1609.08144). At every step the K likeliest
  continuations of a sentence's answers are kept; those by EOS have ended and
  leave their beams to the others. What goes on at `max_length` ends there and
  is ranked as the rest. A single beam decodes what `greedy` does.

  A sentence is done when its worst of the N best scores at least
  log p / ((5 + T) / 6)^alpha for the likeliest answer that goes on. Whatever
  that answer grows into has no larger log p <= 0 and no larger divisor, so no
  better score; and of equal scores, the one that was found first stays.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids, padded with PAD.
    max_length: T, the number of tokens at most, EOS included.
    beam_size: K, how many answers are followed at once.
    n_best: N, how many answers to return, at most K.
    length_penalty: alpha; 0 for none, larger for longer answers.
    constraints: what an answer may not contain.

  Returns:
    The N best answers of each sentence.

  Raises:
    AssertionError: if source is not of rank 2.
    ValueError: if a number is out of range; the message names it.

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> source = jnp.array([[3, 4, 2]])
    >>> def answer(rng):
    ...   params = model.init(rng, source, source)["params"]
    ...   return beam(
    ...     model, params, source, max_length=5, beam_size=4, n_best=2
    ...   )
    >>> jax.eval_shape(answer, jax.random.key(0)).tokens.shape
    (1, 2, 5)
  """
  chex.assert_rank(source, 2, custom_message="source")
  _check(beam_size, n_best, length_penalty)
  variables = {"params": params}
  memory, carry, stages = encode(model, variables, source, max_length)
  step = _mapped_step(model, variables, memory, carry)
  divisors = jnp.asarray(
    ((5 + np.arange(max_length + 1)) / 6) ** length_penalty, jnp.float32
  )

  def unfinished(search: _Search):
    bound = search.log_probs.max(-1) / divisors[max_length]
    done = search.found.scores[:, -1] >= bound
    return ~done.all()

  def extend(search: _Search):
    length, tokens = search.length, search.tokens
    carry, logits = step(search.carry, search.token.T)
    parent, token, log_probs = _likeliest(
      constraints, tokens, length, search.log_probs, logits
    )
    tokens = jnp.take_along_axis(tokens, parent[..., None], axis=1)
    tokens = tokens.at[:, :, length].set(token)
    ended = (token == EOS) | (token == PAD) | (length + 1 == max_length)
    # PAD stands for no token at all.
    scores = log_probs / divisors[length + (token != PAD)]
    scores = jnp.where(ended, scores, -jnp.inf)
    return _Search(
      length + 1,
      _of_parents(carry, parent),
      token,
      tokens,
      jnp.where(ended, -jnp.inf, log_probs),
      _best(search.found, Hypotheses(tokens, scores, log_probs)),
    )

  begin = _begin(carry, source, max_length, beam_size, n_best)
  return extended(stages, unfinished, extend, begin).found


def _check(beam_size: int, n_best: int, length_penalty: float) -> None:
  if not 1 <= n_best <= beam_size:
    raise ValueError(
      f"n_best must be from 1 to beam_size={beam_size}, got {n_best}"
    )
  if not length_penalty >= 0:
    raise ValueError(f"length_penalty must be at least 0, got {length_penalty}")


def _begin(carry, source, max_length: int, beam_size: int, n_best: int):
  """A search before its first step: one answer a sentence, of no tokens."""
  batch_size = source.shape[0]
  # A row without a source, as in the last batch of a set, has no answer.
  empty = (source == PAD).all(-1, keepdims=True)
  first = (jnp.arange(beam_size) == 0)[None]
  nothing = jnp.full((batch_size, n_best), -jnp.inf, jnp.float32)
  return _Search(
    jnp.zeros((), jnp.int32),
    jax.tree.map(
      lambda leaf: (
        jnp.broadcast_to(leaf, (beam_size, *leaf.shape)) if leaf.ndim else leaf
      ),
      carry,
    ),
    jnp.full((batch_size, beam_size), BOS, jnp.int32),
    jnp.full((batch_size, beam_size, max_length), PAD, jnp.int32),
    jnp.where(first & ~empty, 0.0, -jnp.inf).astype(jnp.float32),
    Hypotheses(
      jnp.full((batch_size, n_best, max_length), PAD, jnp.int32),
      nothing,
      nothing,
    ),
  )


def _mapped_step(model: nn.Module, variables, memory, carry):
  """The model's step over [K, B] tokens, all with one memory.

  Scalars of the carry, as the number of tokens in a cache, are shared too: with
  one for each beam, what writes to a cache would become a slow scatter.
  """
  axes = jax.tree.map(lambda leaf: 0 if leaf.ndim else None, carry)

  def step(carry, token):
    step: Any = model.apply(variables, memory, carry, token, method="step")
    carry, logits, _ = step
    return carry, logits.astype(jnp.float32)

  return jax.vmap(step, in_axes=(axes, 0), out_axes=(axes, 0))


def _likeliest(
  constraints: Constraints,
  tokens: jax.Array,
  length: jax.Array,
  log_probs: jax.Array,
  logits: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The K likeliest continuations: parent, token, log-probability, [B, K].

  Of each beam, those of the largest logits come first: log-probabilities of
  different logits can be equal in floating point, and one beam is to choose
  what `greedy` does.
  """
  beam_size, batch_size, vocabulary_size = logits.shape
  allowed = constrained(constraints, tokens.swapaxes(0, 1), length, logits)
  count = min(beam_size, vocabulary_size)
  chosen, token = largest(allowed, count)
  chosen = chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  # An answer that may not go on ends as it is, by PAD, at no cost.
  first = chosen[..., 0]
  chosen = chosen.at[..., 0].set(jnp.where(jnp.isneginf(first), 0.0, first))
  # [K, B, C] to [B, K, C].
  total = log_probs[..., None] + chosen.swapaxes(0, 1)
  total, place = jax.lax.top_k(total.reshape(batch_size, -1), beam_size)
  token = token.swapaxes(0, 1).reshape(batch_size, -1)
  token = jnp.take_along_axis(token, place, axis=-1)
  return place // count, token, total


def _of_parents(carry, parent: jax.Array):
  """What the beams carry, [K, B, ...], taken from their parents [B, K]."""
  place = (parent.T, jnp.arange(parent.shape[0])[None])

  def take(leaf):
    # Without the promise every number is compared with the bounds; mapped over
    # B, the beams would be moved behind the batch and back.
    return leaf.at[place].get(mode="promise_in_bounds") if leaf.ndim else leaf

  return jax.tree.map(take, carry)


def _best(old: Hypotheses, new: Hypotheses) -> Hypotheses:
  """As many as `old` of both, the old ones first among equals."""
  tokens, scores, log_probs = (
    jnp.concatenate(pair, axis=1) for pair in zip(old, new)
  )
  scores, place = jax.lax.top_k(scores, old.scores.shape[1])
  return Hypotheses(
    jnp.take_along_axis(tokens, place[..., None], axis=1),
    scores,
    jnp.take_along_axis(log_probs, place, axis=1),
  )
