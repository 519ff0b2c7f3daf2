"""Decay with distance that depends on the data."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.errors import InconclusiveDimensionOperation

from attention import axes
from attention.checks import check_floating
from attention.head_parameters import BY_POSITION
from attention.scores.base import Score, Wrapper, check_score


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Decayed(Wrapper):
  """score + sum[i] - sum[j], for the sum of two arrays; see `forgetting`."""

  total: jax.Array = dataclasses.field(metadata=BY_POSITION)
  rest: jax.Array = dataclasses.field(metadata=BY_POSITION)

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
    for sums in (self.total, self.rest):
      decay = positions.at_queries(sums) - positions.at_keys(sums)
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


@jax.custom_jvp
def _running_sums(numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The sums of the first n numbers, as an exact part and a small one."""
  # A sum of thousands of numbers has an absolute error that the difference of
  # two sums would keep. Multiples of `unit` have exact sums, as these have no
  # more digits than the dtype; what remains is small, and so is its error.
  bound = jnp.sum(jnp.abs(numbers), axis=-1, keepdims=True)
  _, exponent = jnp.frexp(bound)
  info = jnp.finfo(numbers.dtype)
  unit = jnp.ldexp(jnp.ones_like(bound), exponent - info.nmant)
  unit = jnp.maximum(unit, info.tiny)
  multiples = jnp.round(numbers / unit) * unit
  parts = jnp.stack([multiples, numbers - multiples])
  total, rest = jnp.cumsum(parts, axis=-1)
  return total, rest


@_running_sums.defjvp
def _running_sums_jvp(primals, tangents):
  (moved,) = tangents
  moved = jnp.cumsum(moved, axis=-1)
  return _running_sums(*primals), (moved, jnp.zeros_like(moved))
