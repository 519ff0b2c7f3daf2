"""Decay with distance that depends on the data."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import InconclusiveDimensionOperation

from attention.arrays import axes
from attention.arrays.head_parameters import BY_POSITION
from attention.checks import check_floating, check_shape
from attention.scores.base import Score, Wrapper, check_score
from attention.transforms.tangent_rule import instantiated, with_tangent_rule

# Numbers [..., S] to the sums of the first n: the total for queries, the same
# for keys, and the rest. With two outputs, a kernel adds both cotangents.
RunningSums = Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Forgetting(Wrapper):
  """score + the sum of log_gates from j + 1 to i; see `forgetting`."""

  log_gates: jax.Array = dataclasses.field(metadata=BY_POSITION)

  @property
  def reads_positions(self):
    return True

  def check(self, query, key):
    super().check(query, key)
    number, length = self.log_gates.shape[-1], key.shape[-2]
    try:
      is_short = number < length
    except InconclusiveDimensionOperation:  # of symbols of `jax.export`
      is_short = number != length
    if is_short:
      raise AssertionError(
        f"log_gates has {number} positions, but there are {length} keys"
      )

  def pair_at(self, query, key, positions):
    return with_running_sums(self).pair_at(query, key, positions)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Decayed(Wrapper):
  """score + of_queries[i] - of_keys[j] + rest[i] - rest[j]."""

  of_queries: jax.Array = dataclasses.field(metadata=BY_POSITION)
  of_keys: jax.Array = dataclasses.field(metadata=BY_POSITION)
  rest: jax.Array = dataclasses.field(metadata=BY_POSITION)

  @property
  def reads_positions(self):
    return True

  def pair_at(self, query, key, positions):
    scores = self.score.pair_at(query, key, positions)
    for of_queries, of_keys in (
      (self.of_queries, self.of_keys),
      (self.rest, self.rest),
    ):
      decay = positions.at_queries(of_queries) - positions.at_keys(of_keys)
      scores, decay = axes.aligned(scores, decay)
      scores = scores + decay
    return scores


def with_running_sums(score: Any, compute: RunningSums | None = None) -> Any:
  """The score, or a tree of scores, with the sums of log gates.

  An implementation calls this once, as a score with log gates would compute
  their sums for every tile. None computes them in XLA.
  """

  def summed(each):
    if not isinstance(each, Forgetting):
      return each
    inner = with_running_sums(each.score, compute)
    of_queries, of_keys, rest = (compute or running_sums)(each.log_gates)
    # The derivatives of the totals are those of the sums.
    return Decayed(inner, of_queries, of_keys, jax.lax.stop_gradient(rest))

  return jax.tree.map(
    summed, score, is_leaf=lambda each: isinstance(each, Forgetting)
  )


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
  check_shape("log_gates", log_gates, positions=None)
  wide = jnp.promote_types(log_gates.dtype, jnp.float32)
  return Forgetting(score, log_gates.astype(wide))


def running_sums(
  numbers: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The sums of the first n numbers: an exact part, twice, and a small one."""
  return with_tangent_rule(_running_sums, _tangents_of_running_sums, numbers)


def _running_sums(numbers):
  # Numbers are rounded here, which has no derivative.
  bound = jnp.sum(jnp.abs(numbers), axis=-1, keepdims=True)
  parts = jnp.stack(exact_parts(numbers, bound))
  total, rest = jnp.cumsum(parts, axis=-1)
  return total, total, rest


def _tangents_of_running_sums(primals, tangents):
  (tangent,) = map(instantiated, tangents)
  sums = jnp.cumsum(tangent, axis=-1)
  return running_sums(*primals), (sums, sums, jnp.zeros_like(sums))


def exact_parts(
  numbers: jax.Array, bound: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Numbers [..., S] as numbers that have exact sums, and what remains.

  The bound, [..., 1], is the sum of their absolute values.
  """
  # A sum of thousands of numbers has an absolute error that the difference of
  # two sums would keep. Multiples of `unit` have exact sums, as these have no
  # more digits than the dtype; what remains is small, and so is its error.
  info = jnp.finfo(numbers.dtype)
  unit = _power_of_two(bound) * (2.0 * info.eps)
  unit = jnp.maximum(unit, info.tiny)
  multiples = jnp.round(numbers / unit) * unit
  return multiples, numbers - multiples


def _power_of_two(number: jax.Array) -> jax.Array:
  """The largest power of two up to a positive number."""
  dtype = number.dtype
  bits = jnp.dtype(f"int{jnp.finfo(dtype).bits}")
  # Infinity has all bits of the exponent, and no others.
  exponent = np.array(np.inf, dtype).view(bits)
  kept = jax.lax.bitcast_convert_type(number, bits) & exponent
  return jax.lax.bitcast_convert_type(kept, dtype)
