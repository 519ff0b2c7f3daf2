"""Constraints on predictions, whatever the model's probabilities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.batch import BOS, EOS, PAD


@dataclasses.dataclass(frozen=True)
class Constraints:
  """Constraints on predictions; tokens are never PAD or BOS.

  A prediction without any allowed continuation ends there, without EOS.

  Attributes:
    min_length: number of tokens before EOS is allowed.
    no_repeat_ngram: size of n-grams that may not repeat; 0 to allow all.
    banned: token ids that are not allowed.

  Example:
    >>> Constraints(min_length=2, banned=(3,))
    Constraints(min_length=2, no_repeat_ngram=0, banned=(3,))
  """

  min_length: int = 0
  no_repeat_ngram: int = 0
  banned: tuple[int, ...] = ()


def constrained(
  constraints: Constraints,
  tokens: jax.Array,
  length: jax.Array | int,
  log_probs: jax.Array,
) -> jax.Array:
  """Returns [..., V] with -inf at the tokens that are not allowed next."""
  max_length, vocabulary_size = tokens.shape[-1], log_probs.shape[-1]
  if constraints.min_length >= max_length:
    raise ValueError(
      f"min_length must be less than max_length={max_length}, got"
      f" {constraints.min_length}"
    )
  if max(constraints.banned, default=0) >= vocabulary_size:
    raise ValueError(
      f"banned must be token ids below {vocabulary_size}, got"
      f" {constraints.banned}"
    )
  if 0 < constraints.no_repeat_ngram <= max_length:
    repeats = _repeats(constraints.no_repeat_ngram, tokens, length)
    log_probs = jnp.put_along_axis(
      log_probs, repeats, -jnp.inf, axis=-1, inplace=False
    )
  # XLA fuses this [V] array with the consumer; a scatter would write all
  # log-probabilities once more.
  ids = np.arange(vocabulary_size)
  always = ~np.isin(ids, (PAD, BOS, *constraints.banned))
  allowed = always & ((ids != EOS) | (length >= constraints.min_length))
  allowed = jnp.expand_dims(allowed, range(log_probs.ndim - 1))
  return jnp.where(allowed, log_probs, -jnp.inf)


def _repeats(size: int, tokens: jax.Array, length: jax.Array | int):
  """Returns the tokens that would repeat an n-gram, and PAD elsewhere."""
  num_ngrams = tokens.shape[-1] - size + 1
  # Only n-grams that end within the tokens so far.
  seen = jnp.arange(size - 1, tokens.shape[-1]) < length
  seen = jnp.expand_dims(seen, range(tokens.ndim - 1))
  for offset in range(size - 1):
    last = jax.lax.dynamic_index_in_dim(
      tokens, length - size + 1 + offset, axis=-1
    )
    seen = seen & (tokens[..., offset : offset + num_ngrams] == last)
  return jnp.where(seen, tokens[..., size - 1 :], PAD)
