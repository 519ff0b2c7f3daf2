"""Normalizers of exponentials of scores: softmax and its relatives."""

import dataclasses
from typing import Annotated as Shaped
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.head_parameters import SCALAR
from attention.arrays.softmax import exponential
from attention.checks import check_numbers
from attention.normalizers.base import Normalizer, OnlineNormalizer

_SMALL = 0.02


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Softmax(OnlineNormalizer):
  """exp(s_j) / sum_k exp(s_k), optionally with a sink in the sum.

  A sink is the score of a further key whose value is zero, so that a query may
  attend to nothing. See "Efficient Streaming Language Models with Attention
  Sinks", Xiao et al., 2023 (https://arxiv.org/abs/2309.17453); a sink per head
  is a parameter of gpt-oss (https://arxiv.org/abs/2508.10925). `sink=0.0` is
  the "off-by-one" softmax.

  Attributes:
    sink: None, a number, or [H] for scores [..., H, T, S].

  Example:
    >>> import jax.numpy as jnp
    >>> from attention.normalizers import softmax
    >>> softmax(sink=0.0)(jnp.zeros((1, 3)))
    Array([[0.25, 0.25, 0.25]], dtype=float32)
  """

  sink: float | Shaped[jax.Array, "H"] | None = dataclasses.field(
    default=None, metadata=SCALAR
  )

  def __call__(self, scores):
    if self.sink is None:
      return super().__call__(scores)
    sink = jnp.asarray(self.sink, scores.dtype)[..., None, None]
    sink = axes.with_rank(sink, scores.ndim)
    sink = jnp.broadcast_to(sink, (*scores.shape[:-1], 1))
    with_sink = jnp.concatenate([scores, sink], axis=-1)
    return jax.nn.softmax(with_sink, axis=-1)[..., :-1]

  def terms(self, scores, maximum):
    parts = exponential(scores - maximum)
    return parts, parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Quotient(OnlineNormalizer):
  """exp(s_j) / sum_k exp(d_k), for a pair (s, d) of scores of each pair.

  See `Score.denominator`.
  """

  def exponents(self, scores):
    return jnp.maximum(*scores)

  def terms(self, scores, maximum):
    numerators, parts = (exponential(each - maximum) for each in scores)
    return numerators, parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sigmoid(Normalizer):
  """The logistic function of each score plus a bias, without a sum over keys.

  See "Theory, Analysis, and Best Practices for Sigmoid Self-Attention",
  Ramapuram et al., 2024 (https://arxiv.org/abs/2409.04431), which recommends a
  bias of -log S.

  Attributes:
    bias: a number, or [H] for scores [..., H, T, S].

  Example:
    >>> import jax.numpy as jnp
    >>> from attention.normalizers import sigmoid
    >>> sigmoid()(jnp.zeros((1, 3)))
    Array([[0.5, 0.5, 0.5]], dtype=float32)
  """

  ignores_hidden: ClassVar[bool] = True
  is_elementwise: ClassVar[bool] = True
  bias: float | Shaped[jax.Array, "H"] = dataclasses.field(
    default=0.0, metadata=SCALAR
  )

  def __call__(self, scores):
    return jax.nn.sigmoid(jnp.add(*axes.with_scalar(scores, self.bias)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Softpick(OnlineNormalizer):
  """relu(exp(s_j) - 1) / sum_k |exp(s_k) - 1|.

  Negative scores get weight 0 and need no sink. See "Softpick: No Attention
  Sink, No Massive Activations with Rectified Softmax", Zuhri et al., 2025
  (https://arxiv.org/abs/2504.20966).

  Attributes:
    epsilon: is added to the sum, after division by the largest exponential. A
      row whose scores are all 0 has weights 0, whatever the epsilon.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention.normalizers import softpick
    >>> softpick()(jnp.log(jnp.array([[2.0, 2.0, 0.5]])))
    Array([[0.4, 0.4, 0. ]], dtype=float32)
  """

  smallest_maximum: ClassVar[float] = 0.0
  epsilon: float = dataclasses.field(default=1e-8, metadata={"static": True})

  def __post_init__(self):
    check_numbers(epsilon=self.epsilon)

  def terms(self, scores, maximum):
    return _softpick_terms(scores, maximum)


@jax.custom_jvp
def _softpick_terms(
  scores: jax.Array, maximum: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The terms of softpick; the maximum is a constant for derivatives."""
  # exp(scores) - 1, divided by exp(maximum).
  scale = jnp.exp(-maximum)
  terms = exponential(scores - maximum) - scale
  # The difference has too few digits for small scores.
  is_small = jnp.abs(scores) <= _SMALL
  small = jnp.where(is_small, scores, 0.0)
  terms = jnp.where(is_small, _expm1(small) * scale, terms)
  terms = jnp.where(jnp.isneginf(scores), 0.0, terms)
  return jnp.maximum(terms, 0.0), jnp.abs(terms)


@_softpick_terms.defjvp
def _tangents_of_softpick_terms(primals, tangents):
  # By the signs of scores, as the terms are expensive to compute again.
  (scores, maximum), (of_scores, _) = primals, tangents
  tangent = exponential(scores - maximum) * of_scores
  of_negative = jnp.where(jnp.isneginf(scores), 0.0, -tangent)
  of_terms = (
    jnp.where(scores > 0.0, tangent, 0.0),
    jnp.where(scores >= 0.0, tangent, of_negative),
  )
  return _softpick_terms(scores, maximum), of_terms


def _expm1(x: jax.Array) -> jax.Array:
  """exp(x) - 1 for |x| <= _SMALL, faster than `jnp.expm1` on CPUs."""
  series = jnp.ones_like(x)
  for n in range(8 if x.dtype == jnp.float64 else 5, 1, -1):
    series = 1.0 + x * (1.0 / n) * series
  return x * series


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SignedSoftmax(OnlineNormalizer):
  """sign(s_j) exp(|s_j|) / sum_k exp(|s_k|): weights may be negative.

  It is the normalizer of Cog attention. See "More Expressive Attention with
  Negative Weights", Lv et al., 2024 (https://arxiv.org/abs/2411.07176).

  Example:
    >>> import jax.numpy as jnp
    >>> from attention.normalizers import signed_softmax
    >>> signed_softmax()(jnp.array([[1.0, -1.0]]))
    Array([[ 0.5, -0.5]], dtype=float32)
  """

  def exponents(self, scores):
    return jnp.where(jnp.isneginf(scores), -jnp.inf, jnp.abs(scores))

  def terms(self, scores, maximum):
    parts = exponential(self.exponents(scores) - maximum)
    # `jnp.sign` cannot be compiled for a TPU that is absent.
    negative = jnp.where(scores < 0.0, -parts, 0.0)
    return jnp.where(scores > 0.0, parts, negative), parts
