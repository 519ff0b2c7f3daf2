"""Decay with distance that depends on the data."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.errors import InconclusiveDimensionOperation

from attention import axes
from attention.checks import check_floating
from attention.head_parameters import VECTOR
from attention.scores.base import Score, Wrapper, check_score


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Decayed(Wrapper):
  """score + total[i] - total[j]; see `forgetting`."""

  total: jax.Array = dataclasses.field(metadata=VECTOR)
  rounding: jax.Array = dataclasses.field(metadata=VECTOR)  # of the total

  @property
  def reads_positions(self):
    return True

  def check(self, query, key):
    super().check(query, key)
    number, length = self.total.shape[-1], key.shape[-2]
    try:
      is_short = number < length
    except InconclusiveDimensionOperation:  # of symbols of `jax.export`
      is_short = number != length
    if is_short:
      raise AssertionError(
        f"log_gates has {number} positions, but there are {length} keys"
      )

  def pair_at(self, query, key, positions):
    scores = self.score.pair_at(query, key, positions)
    for sums in (self.total, self.rounding):
      of_query, of_key = (
        jnp.take(sums, places, axis=-1, mode="clip")
        for places in (positions.query, positions.key)
      )
      decay = of_query[..., :, None] - of_key[..., None, :]
      scores, decay = axes.aligned(scores, decay)
      scores = scores + decay
    return scores


def forgetting(score: Score, log_gates: jax.Array) -> Score:
  """The Forgetting Transformer's score, with a data-dependent decay.

  The score of query i and key j is the given one plus the sum of log_gates from
  j + 1 to i. See "Forgetting Transformer: Softmax Attention with a Forget
  Gate", Lin et al., 2025, equation 4 (https://arxiv.org/abs/2503.02130). Use it
  with `masks.causal()`.

  Args:
    score: the score of contents.
    log_gates: [..., S], the logarithm of the forget gate at each position, for
      instance `jax.nn.log_sigmoid(inputs @ w + b)`, [B, H, S] for scores [B, H,
      T, S].

  Returns:
    A score for `attend`; `log_gates` receive gradients.

  Raises:
    AssertionError: if `log_gates` are not floating-point numbers, or fewer than
      the keys.
    ValueError: if `score` is not a `Score`.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import scores
    >>> score = forgetting(scores.dot(), jnp.array([-1.0, -2.0, -4.0]))
    >>> score(jnp.zeros((3, 1)), jnp.zeros((3, 1)))[2]
    Array([-6., -4.,  0.], dtype=float32)
  """
  check_score(score)
  check_floating(log_gates=log_gates)
  log_gates = jnp.asarray(log_gates)
  wide = jnp.promote_types(log_gates.dtype, jnp.float32)
  return Decayed(score, *_running_sums(log_gates.astype(wide)))


def _running_sums(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The sums of the first n numbers, and their rounding errors."""
  # A sum of thousands of numbers has an absolute error that the difference of
  # two sums would keep.
  axis = numbers.ndim - 1
  if not isinstance(numbers.shape[-1], int):
    # JAX has no associative scan over a symbolic length of `jax.export`.
    total = jnp.cumsum(numbers, axis=axis)
    return total, jnp.zeros_like(total)

  def add(left, right):
    (total, rest), (other, other_rest) = left, right
    new = total + other
    shift = new - total
    error = (total - (new - shift)) + (other - shift)
    return new, rest + other_rest + error

  constant = jax.lax.stop_gradient(numbers)
  total, rest = jax.lax.associative_scan(
    add, (constant, jnp.zeros_like(constant)), axis=axis
  )
  differentiable = jnp.cumsum(numbers, axis=axis)
  # Equal to the total, with the derivatives of the sum.
  return total + (differentiable - jax.lax.stop_gradient(differentiable)), rest
