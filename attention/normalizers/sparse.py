"""Normalizers that give low scores a weight of exactly zero."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention.checks import check_numbers
from attention.normalizers.base import Normalizer, row_maximum

_MOST_STEPS = 50
_MANY = 256  # entries of a row whose groups are solved first
_GROUP = 16  # entries of a group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Entmax(Normalizer):
  """max((alpha - 1) s_j - threshold, 0) ** (1 / (alpha - 1)), with sum 1.

  Weights of low scores are exactly 0. See "Sparse Sequence-to-Sequence Models",
  Peters et al., 2019, equation 9 (https://arxiv.org/abs/1905.05702).

  Attributes:
    alpha: more than 1 (softmax) and at most 2 (sparsemax).

  Raises:
    ValueError: if `alpha` is outside of (1, 2].

  Example:
    >>> import jax.numpy as jnp
    >>> from attention.normalizers import entmax
    >>> entmax()(jnp.array([[2.0, 2.0, -1.0]]))
    Array([[0.5, 0.5, 0. ]], dtype=float32)
  """

  ignores_hidden: ClassVar[bool] = True
  alpha: float = dataclasses.field(default=1.5, metadata={"static": True})

  def __post_init__(self):
    check_numbers(alpha=self.alpha)
    if not 1.0 < self.alpha <= 2.0:
      raise ValueError(
        f"alpha must be in (1, 2], got {self.alpha}; softmax is the limit of 1"
      )

  @property
  def power(self) -> float:
    """The power of the formula."""
    return 1.0 / (self.alpha - 1.0)

  def __call__(self, scores):
    return _sparse_weights(scores, self.power)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sparsemax(Normalizer):
  """The projection of the scores onto the simplex.

  See "From Softmax to Sparsemax", Martins and Astudillo, 2016
  (https://arxiv.org/abs/1602.02068).

  Example:
    >>> import jax.numpy as jnp
    >>> from attention.normalizers import sparsemax
    >>> sparsemax()(jnp.array([[1.0, 0.5, -1.0]]))
    Array([[0.75, 0.25, 0.  ]], dtype=float32)
  """

  ignores_hidden: ClassVar[bool] = True
  power: ClassVar[float] = 1.0  # entmax's, for alpha = 2

  def __call__(self, scores):
    return _sparse_weights(scores, self.power)


def _sparse_weights(scores: jax.Array, power: float) -> jax.Array:
  """max(1 + scores / power - t, 0) ** power, where t gives rows the sum 1."""
  wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
  shifted = (wide - row_maximum(wide)) / power
  weights = _power(shifted - _threshold(shifted, power), power)
  return weights.astype(scores.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _threshold(shifted: jax.Array, power: float) -> jax.Array:
  """The t [..., 1] with sum_j max(1 + shifted_j - t, 0) ** power = 1."""
  return _solved(jax.lax.stop_gradient(shifted), power)


# Outside of `jax.jit` the loop would be compiled at every call.
@functools.partial(jax.jit, static_argnums=1, inline=True)
def _solved(shifted, power: float):
  """The threshold, by Newton's method from below."""
  *leading, length = shifted.shape
  # The largest entry is 0 and its weight at most 1.
  start = jnp.zeros_like(shifted, shape=(*leading, 1))
  if isinstance(length, int) and length >= _MANY:
    # The threshold of some of the entries is a lower bound.
    groups = shifted[..., : length // _GROUP * _GROUP]
    groups = groups.reshape(*leading, _GROUP, length // _GROUP)
    start = _solved(jnp.max(groups, axis=-2), power)

  def advance(state):
    threshold, _, count = state
    step = _newton_step(shifted, threshold, power)
    # A group of very low scores has no step.
    return threshold + jnp.where(step > 0.0, step, 0.0), step, count + 1

  # The norm of max(1 + shifted - t, 0) of order `power` is convex in t and
  # nearly linear: the error after a step is about the step's square.
  tolerance = jnp.sqrt(jnp.finfo(shifted.dtype).eps) / (4 * power)
  return jax.lax.while_loop(
    lambda state: jnp.any(state[1] > tolerance) & (state[2] < _MOST_STEPS),
    advance,
    (start, jnp.full_like(start, jnp.inf), 0),
  )[0]


def _newton_step(shifted, threshold, power: float):
  """(norm - 1) / -(d norm / d threshold), with norm = total ** (1 / power)."""
  slope, total = (
    jnp.sum(_power(shifted - threshold, exponent), axis=-1, keepdims=True)
    for exponent in (power - 1.0, power)
  )
  # total - total ** (1 - 1 / power), without a difference of nearly equal ones.
  return -total * jnp.expm1(-jnp.log(total) / power) / slope


@_threshold.defjvp
def _threshold_jvp(power, primals, tangents):
  """The derivative of the equation that defines the threshold."""
  (shifted,), (tangent,) = primals, tangents
  threshold = _threshold(shifted, power)
  # In a `scan`, JAX ignores this rule when it differentiates a gradient. Two
  # steps from the solution have its first three derivatives.
  for _ in range(2):
    threshold += _newton_step(shifted, threshold, power)
  slopes = _power(shifted - threshold, power - 1.0)
  # Without `where`, XLA's compiler for CPUs (jaxlib 0.10.2) has wrong results
  # under `jax.vmap`: https://github.com/jax-ml/jax/issues/39103.
  products = jnp.where(slopes > 0.0, slopes * tangent, 0.0)
  mean = jnp.sum(products, -1, keepdims=True)
  return threshold, mean / jnp.sum(slopes, -1, keepdims=True)


def _power(base: jax.Array, exponent: float) -> jax.Array:
  """(1 + base) ** exponent where that base is positive, elsewhere 0."""
  is_zero = base <= -1.0  # not for NaN, which stays NaN
  base = jnp.where(is_zero, 0.0, base)
  if exponent in (0.0, 1.0, 2.0):
    return jnp.where(is_zero, 0.0, (1.0 + base) ** int(exponent))
  # For large exponents, 1 + base would have too few digits.
  return jnp.where(is_zero, 0.0, jnp.exp(exponent * jnp.log1p(base)))
