"""Scores made from another score."""

import dataclasses
from typing import Annotated as Shaped

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.head_parameters import SCALAR, VECTOR
from attention.checks import (
  check_numbers,
  check_parameter_above_zero,
  check_shape,
)
from attention.scores.base import Score, Wrapper, check_score


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MappedKeys(Wrapper):
  """A score of keys to which `map_key` has already been applied."""

  def check(self, query, key):
    """Mapped keys cannot be checked."""

  def map_key(self, key):
    return key


def with_mapped_keys(score: Score) -> Score:
  """The same score, for keys to which its `map_key` has been applied.

  An RNN decoder then maps the encoder's states once, not at every step.

  Args:
    score: a bound score.

  Returns:
    A score `s` with `s(query, score.map_key(key)) == score(query, key)`.

  Raises:
    ValueError: if `score` is not a `Score`; `attention.scores.as_score` makes
      one of a function.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> query, key = jnp.ones((2, 3)), jnp.ones((4, 3))
    >>> score = scores.cosine(sharpness=5.0)
    >>> memory = score.map_key(key)  # once
    >>> with_mapped_keys(score)(query, memory)[0, 0]
    Array(5., dtype=float32)
  """
  check_score(score)
  return MappedKeys(score)


class OfEachScore(Wrapper):
  """A function of each score alone; hidden keys stay hidden."""

  @property
  def is_finite(self):
    return self.score.is_finite

  def changed(self, scores: jax.Array) -> jax.Array:
    """Scores [..., t, s], none of them -inf, to scores of that shape."""
    raise NotImplementedError

  def pair_at(self, query, key, positions):
    scores = self.score.pair_at(query, key, positions)
    if self.is_finite:
      return self.changed(scores)
    # The derivative of the function at -inf may be infinite.
    hidden = scores == -jnp.inf
    changed = self.changed(jnp.where(hidden, 0.0, scores))
    hidden, changed = axes.aligned(hidden, changed)
    return jnp.where(hidden, -jnp.inf, changed)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SoftCap(OfEachScore):
  """cap * tanh(score / cap), which lies between -cap and cap.

  See "Gemma 2: Improving Open Language Models at a Practical Size", Gemma Team,
  2024, section 2 (https://arxiv.org/abs/2408.00118).

  Attributes:
    score: the score.
    cap: a positive number, or an array [...] over leading axes.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> score = scores.soft_cap(scores.dot(), 50.0)
    >>> score(jnp.array([[100.0]]), jnp.ones((1, 1)))
    Array([[48.2]], dtype=float32)
  """

  cap: float | Shaped[jax.Array, "..."] = dataclasses.field(metadata=SCALAR)

  def check(self, query, key):
    super().check(query, key)
    check_parameter_above_zero(cap=self.cap)

  def changed(self, scores):
    scores, cap = axes.with_scalar(scores, self.cap)
    return cap * jnp.tanh(scores / cap)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Temperature(OfEachScore):
  """score / temperature, with a temperature for each head.

  Attributes:
    score: the score.
    temperature: a positive number, or an array [...] over leading axes, for
      instance [H].

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> score = scores.temperature(scores.dot(), jnp.array([1.0, 2.0]))
    >>> score(jnp.ones((2, 1, 4)), jnp.ones((2, 1, 4))).ravel()
    Array([4., 2.], dtype=float32)
  """

  temperature: float | Shaped[jax.Array, "..."] = dataclasses.field(
    metadata=SCALAR
  )

  def check(self, query, key):
    super().check(query, key)
    check_parameter_above_zero(temperature=self.temperature)

  def changed(self, scores):
    scores, temperature = axes.with_scalar(scores, self.temperature)
    return scores / temperature


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QueryKeyNorm(Wrapper):
  """The score of queries and keys that are divided by their root mean square.

  See "Query-Key Normalization for Transformers", Henry et al., 2020
  (https://arxiv.org/abs/2010.04245), and "Scaling Vision Transformers to 22
  Billion Parameters", Dehghani et al., 2023, section 2
  (https://arxiv.org/abs/2302.05442).

  Attributes:
    score: the score of normalised tokens.
    query_gain: [..., Dq], by which normalised queries are multiplied, or None.
    key_gain: [..., Dk], by which normalised keys are multiplied, or None.
    epsilon: added to the mean square.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> score = scores.qk_norm(scores.dot())
    >>> score(jnp.array([[3.0, 0.0]]), jnp.array([[2.0, 2.0]]))
    Array([[1.41]], dtype=float32)
  """

  query_gain: Shaped[jax.Array, "... Dq"] | None = dataclasses.field(
    default=None, metadata=VECTOR
  )
  key_gain: Shaped[jax.Array, "... Dk"] | None = dataclasses.field(
    default=None, metadata=VECTOR
  )
  epsilon: float = dataclasses.field(default=1e-6, metadata={"static": True})

  @property
  def is_finite(self):
    return self.score.is_finite

  def check(self, query, key):
    check_numbers(epsilon=self.epsilon)
    for name, gain, tokens in (
      ("query_gain", self.query_gain, query),
      ("key_gain", self.key_gain, key),
    ):
      if gain is not None:
        check_shape(name, gain, features=tokens.shape[-1], fits=name[:-5])
    super().check(query, key)

  def map_query(self, query):
    return self.score.map_query(self._normalised(query, self.query_gain))

  def map_key(self, key):
    return self.score.map_key(self._normalised(key, self.key_gain))

  def _normalised(self, tokens, gain):
    wide = tokens.astype(jnp.promote_types(tokens.dtype, jnp.float32))
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(square + self.epsilon)
    if gain is not None:
      wide, gain = axes.aligned(wide, jnp.asarray(gain)[..., None, :])
      wide = wide * gain
    return wide.astype(tokens.dtype)
