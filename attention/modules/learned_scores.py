"""Flax modules that own the parameters of a score."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attention import scores
from attention.checks import check_positive
from attention.names import (
  PositionalScoreName,
  ScoreName,
  ScoreWrapperName,
)
from attention.scores import Score, as_score

SCORE_NAMES: tuple[str, ...] = typing.get_args(ScoreName)
POSITIONAL_SCORE_NAMES: tuple[str, ...] = typing.get_args(PositionalScoreName)
SCORE_WRAPPER_NAMES: tuple[str, ...] = typing.get_args(ScoreWrapperName)

# A softmax over cosines, at most 1, is nearly uniform. With this factor, the
# weight of an equal key is e^10 times that of an orthogonal one.
INITIAL_SHARPNESS = 10.0


class LearnedScore(nn.Module):
  """Creates the parameters of a score from its name.

  Attributes:
    score: a name from `SCORE_NAMES` or `POSITIONAL_SCORE_NAMES`, or a score or
      callable, used unchanged.
    hidden_size: A of the additive and the concat score and of local_p; None
      means the key's number of features.
    num_heads: H; None for a single head, without a head axis.
    num_key_value_heads: K; the additive score projects keys once for each
      key/value head.
    max_length: the number of key positions that the location score has; keys
      after them are hidden.
    max_distance: the largest distance that the shaw and the disentangled score
      distinguish.
    window: the largest distance of a key from the center of local_m and
      local_p.
    local_score: "general" or "dot", the score of local_m and local_p within
      their window.
    causal: whether the center of local_p is a share of the keys up to the
      query instead of all keys, for causal self-attention.
    wrapper: a name from `SCORE_WRAPPER_NAMES` that changes the score, or None.
      "qk_norm" normalises queries and keys; it and "temperature" divide the
      score by a learned number for each head. It changes the score within the
      window of local_m and local_p.
    cap: the bound of the scores of the wrapper "soft_cap".
    dtype: the dtype of the returned parameters; None means `param_dtype`.
    param_dtype: the dtype in which parameters are stored.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> module = LearnedScore("additive", hidden_size=16)
    >>> score, _ = module.init_with_output(jax.random.key(0), 8, 6)
    >>> score(jnp.ones((3, 8)), jnp.ones((5, 6))).shape
    (3, 5)
  """

  score: str | Score | Callable = "additive"
  hidden_size: int | None = None
  num_heads: int | None = None
  num_key_value_heads: int | None = None
  max_length: int = 128
  max_distance: int = 16
  window: int = 10
  local_score: str = "general"
  causal: bool = False
  wrapper: str | None = None
  cap: float = 50.0
  dtype: DTypeLike | None = None
  param_dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(
    self,
    query_size: int,
    key_size: int,
    key_lengths: jax.Array | None = None,
  ) -> Score:
    """The score for queries [..., T, Dq] and keys [..., S, Dk].

    It is a pytree, usable in `lax.scan` and outside of modules. `key_lengths`
    [...] are the numbers of keys without padding, of which the center of
    local_p is a share; None means S. Other scores ignore them.
    """
    if not isinstance(self.score, str):
      return self._wrapped(as_score(self.score))
    score = self._named(query_size, key_size)
    if not isinstance(score, scores.local):
      return self._wrapped(score)
    if self.score == "local_m" or self.causal or key_lengths is None:
      return score
    return dataclasses.replace(
      score, length=jnp.asarray(key_lengths, jnp.float32)
    )

  def _named(self, query_size, key_size) -> Score:
    names = SCORE_NAMES + POSITIONAL_SCORE_NAMES
    if self.score not in names:
      raise ValueError(
        f"score must be a callable or one of {', '.join(names)}; "
        f"got {self.score!r}"
      )
    sizes = ("hidden_size", "max_length", "max_distance", "window")
    check_positive(**{name: getattr(self, name) for name in sizes})
    hidden_size = key_size if self.hidden_size is None else self.hidden_size
    if self.score in POSITIONAL_SCORE_NAMES:
      return self._positional(query_size, key_size, hidden_size)
    heads, memory_heads = self.num_heads, self.num_key_value_heads
    match self.score:
      case "dot":
        return scores.dot()
      case "scaled_dot":
        return scores.scaled_dot()
      case "general":
        return scores.general(self._weight("weight", query_size, key_size))
      case "additive":
        return scores.additive(
          self._weight("query_weight", query_size, hidden_size),
          self._weight(
            "key_weight", key_size, hidden_size, heads=memory_heads or heads
          ),
          self._vectors("score_weight", hidden_size),
          self._parameter("bias", nn.initializers.zeros, hidden_size),
        )
      case "concat":
        return scores.concat(
          self._weight("weight", query_size + key_size, hidden_size),
          self._vectors("score_weight", hidden_size),
        )
      case "cosine":
        return scores.cosine(self._sharpness())
    raise ValueError(f"no score is built for the name {self.score!r}")

  def _positional(self, query_size, key_size, hidden_size) -> Score:
    match self.score:
      case "location":
        return scores.location(
          self._vectors("weight", self.max_length, query_size)
        )
      case "local_m":
        return scores.local(self._local(query_size, key_size), self.window)
      case "local_p":
        return scores.local(
          self._local(query_size, key_size),
          self.window,
          self._weight("query_weight", query_size, hidden_size),
          self._vectors("position_weight", hidden_size),
          causal=self.causal,
        )
      case "shaw":
        size = 2 * self.max_distance + 1
        return scores.shaw(self._vectors("relative_keys", size, key_size))
      case "disentangled":
        size = 2 * self.max_distance
        return scores.disentangled(
          self._vectors("relative_keys", size, key_size),
          self._vectors("relative_queries", size, key_size),
        )
      case "transformer_xl":
        size = query_size + query_size % 2
        zeros = nn.initializers.zeros
        return scores.transformer_xl(
          self._weight("weight", size, query_size),
          self._parameter("content_bias", zeros, query_size),
          self._parameter("position_bias", zeros, query_size),
        )
    raise ValueError(f"no score is built for the name {self.score!r}")

  def _local(self, query_size, key_size) -> Score:
    match self.local_score:
      case "dot":
        return self._wrapped(scores.dot())
      case "general":
        weight = self._weight("weight", query_size, key_size)
        return self._wrapped(scores.general(weight))
    raise ValueError(
      f"local_score must be 'general' or 'dot'; got {self.local_score!r}"
    )

  def _wrapped(self, score: Score) -> Score:
    match self.wrapper:
      case None:
        return score
      case "soft_cap":
        return scores.soft_cap(score, self.cap)
      case "qk_norm":
        return scores.temperature(scores.qk_norm(score), self._temperature())
      case "temperature":
        return scores.temperature(score, self._temperature())
    raise ValueError(
      f"wrapper must be None or one of {', '.join(SCORE_WRAPPER_NAMES)}; "
      f"got {self.wrapper!r}"
    )

  def _temperature(self):
    """[] or [H], positive, initially 1."""
    return jnp.exp(self._parameter("log_temperature", nn.initializers.zeros))

  def _weight(self, name, inputs, outputs, heads=None):
    """[D, A], or [H, D, A] with the fan-in of one head."""
    heads_axis = () if self.num_heads is None else (0,)
    initialize = nn.initializers.lecun_normal(
      in_axis=-2, out_axis=-1, batch_axis=heads_axis
    )
    return self._parameter(name, initialize, inputs, outputs, heads=heads)

  def _vectors(self, name, *sizes):
    """[..., D], or [H, ..., D], scaled so that products have variance 1."""
    initialize = nn.initializers.normal(1.0 / math.sqrt(max(sizes[-1], 1)))
    return self._parameter(name, initialize, *sizes)

  def _sharpness(self):
    """[] or [H], positive, as its logarithm is the parameter."""
    constant = nn.initializers.constant(math.log(INITIAL_SHARPNESS))
    return jnp.exp(self._parameter("log_sharpness", constant))

  def _parameter(self, name, initialize, *sizes, heads=None):
    """[*sizes], or [H, *sizes] if there are heads."""
    heads = heads or self.num_heads
    shape = sizes if heads is None else (heads, *sizes)
    array = self.param(name, initialize, shape, self.param_dtype)
    return array if self.dtype is None else array.astype(self.dtype)


def learned_score(
  score: str | Score | Callable, options: Mapping[str, Any] | None, **own: Any
) -> LearnedScore:
  """The score of a module, with its `score_options` and arguments of its own.

  Raises:
    ValueError: if there is an option that `LearnedScore` does not have, that
      the module sets itself, or that a score without a name does not read.
  """
  options = options or {}
  fields = [each.name for each in dataclasses.fields(LearnedScore)]
  reserved = {"score", "parent", "name", *own}
  known = [name for name in fields if name not in reserved]
  if not isinstance(score, str):  # It has parameters of its own.
    known = ["wrapper", "cap"]
  for name in options:
    if name not in known:
      raise ValueError(
        f"score_options has no {name!r}; there are {', '.join(known)}"
      )
  return LearnedScore(score, **own, **options)
