"""The softmax of rows of scores, all at once or one tile after another.

Masked scores are -inf. A row without a visible key has the total 0.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.arrays import axes


class Statistics(NamedTuple):
  """Statistics of rows: weights = exp(scores - maximum) / total."""

  # Results do not depend on the maximum, which is a constant of derivatives.
  # It is finite: rows without a visible key have the dtype's lowest number.
  maximum: jax.Array
  total: jax.Array

  @property
  def lse(self) -> jax.Array:
    """The log-sum-exp, -inf in rows without a visible key."""
    empty = self.total == 0.0
    lse = self.maximum + jnp.log(self.divisor)
    return jnp.where(empty, -jnp.inf, lse)

  @property
  def divisor(self) -> jax.Array:
    """The total, or 1 in rows without a visible key."""
    return jnp.where(self.total == 0.0, 1.0, self.total)

  @property
  def inverse(self) -> jax.Array:
    """1 / total, or 0 in rows without a visible key."""
    return jnp.where(self.total == 0.0, 0.0, 1.0 / self.divisor)

  def weights(self, scores: jax.Array) -> jax.Array:
    """The weights [..., t, s] of scores, for statistics [..., t]."""
    maximum = jax.lax.stop_gradient(self.maximum)[..., None]
    return exponential(scores - maximum) * self.inverse[..., None]

  def tangent(self, of_lse: jax.Array) -> "Statistics":
    """The tangents of the statistics, for that of the lse."""
    return Statistics(jnp.zeros_like(self.maximum), self.total * of_lse)

  def relative_to(self, other: "Statistics") -> jax.Array:
    """exp(lse - other lse) of rows; 0 without a key in one of them."""
    ratio = self.total / other.divisor
    difference = jnp.where(self.total == 0.0, 0.0, self.maximum - other.maximum)
    return jnp.where(other.total == 0.0, 0.0, ratio * jnp.exp(difference))

  def broadcast_to(self, shape: tuple[int, ...]) -> "Statistics":
    """Statistics of `shape`."""
    return Statistics(*(jnp.broadcast_to(each, shape) for each in self))


def exponential(exponents: jax.Array) -> jax.Array:
  """exp(exponents), at most 1."""
  # Scores that are computed twice may be rounded differently, but none is above
  # the maximum. The derivative must be that of exp.
  excess = jax.lax.stop_gradient(jnp.maximum(exponents, 0.0))
  return jnp.exp(exponents - excess)


def without_keys(like: jax.Array) -> Statistics:
  """Statistics of rows without a key, in the shape and dtype of `like`."""
  zeros = jnp.zeros_like(like)
  return Statistics(zeros + jnp.finfo(like.dtype).min, zeros)


def of_rows(has_keys: jax.Array, dtype: Any) -> Statistics:
  """Statistics that say only which rows have a visible key."""
  total = has_keys.astype(dtype)
  return Statistics(jnp.zeros_like(total), total)


def from_lse(lse: jax.Array) -> Statistics:
  """Statistics with this log-sum-exp, differentiable."""
  empty = jnp.isneginf(lse)
  lowest = jnp.finfo(lse.dtype).min
  maximum = jax.lax.stop_gradient(jnp.where(empty, lowest, lse))
  exponentials = jnp.exp(jnp.where(empty, 0.0, lse - maximum))
  return Statistics(maximum, jnp.where(empty, 0.0, exponentials))


def softmax(
  scores: jax.Array,
  visible: jax.Array,
  *,
  may_hide: bool = True,
  may_be_empty: bool = True,
) -> tuple:
  """The weights of scores [..., T, S] where `visible`, and the statistics.

  `may_hide` is false if no score is -inf. A row of scores that overflow to -inf
  is then NaN. `may_be_empty` is false if each row has a visible key.
  """
  if may_hide:
    visible = visible & (scores != -jnp.inf)
  # XLA needs fewer passes over the pairs for finite logits and zeros instead of
  # exponentials than for logits of -inf: on TPUs half the time.
  lowest = jnp.finfo(scores.dtype).min
  logits = jnp.where(visible, scores, lowest)
  initial = lowest if scores.shape[-1] == 0 else None
  maximum = jnp.max(jax.lax.stop_gradient(logits), axis=-1, initial=initial)
  exponentials = _exponentials(logits, visible, maximum)
  statistics = Statistics(maximum, jnp.sum(exponentials, axis=-1))
  divisor = statistics.total
  if may_be_empty:
    # Unlike a `where`, this lets XLA make one GPU kernel of the weights. Totals
    # are 0, or 1 at least but for rounding.
    divisor = jnp.maximum(divisor, 2.0**-60)
  return exponentials / divisor[..., None], statistics


@jax.custom_jvp
def _exponentials(logits, visible, maximum):
  """The exponentials of visible logits, 0 elsewhere."""
  return jnp.where(visible, jnp.exp(logits - maximum[..., None]), 0.0)


@_exponentials.defjvp
def _exponentials_jvp(primals, tangents):
  # The tangent of a hidden logit is 0 already: another `where` would read
  # `visible` once more. The maximum is a constant of derivatives.
  exponentials = _exponentials(*primals)
  return exponentials, exponentials * tangents[0]


def merged(
  contexts: Sequence[jax.Array], parts: Sequence[Statistics]
) -> tuple[jax.Array, Statistics]:
  """The context and the statistics over all keys of disjoint sets of keys."""
  maximum = parts[0].maximum
  for part in parts[1:]:
    maximum = jnp.maximum(maximum, part.maximum)
  shares = [part.total * jnp.exp(part.maximum - maximum) for part in parts]
  statistics = Statistics(maximum, sum(shares[1:], shares[0]))
  terms = [
    _part((share / statistics.divisor)[..., None], context.astype(share.dtype))
    for share, context in zip(shares, contexts)
  ]
  return sum(terms[1:], terms[0]), statistics


@jax.custom_jvp
def _part(share, context):
  """Share * context; rows that are NaN have no derivatives."""
  return share * context


@_part.defjvp
def _part_jvp(primals, tangents):
  (share, context), (d_share, d_context) = primals, tangents
  finite = jnp.where(jnp.isfinite(context), context, 0.0)
  return _part(*primals), d_share * finite + share * d_context


def part_of(
  combined: tuple[jax.Array, Statistics], context: jax.Array
) -> tuple[jax.Array, Statistics]:
  """The combined result of `of_rows`, with the derivatives of one context."""
  mean, statistics = combined
  context = context / statistics.divisor[..., None]
  return mean + context - jax.lax.stop_gradient(context), statistics


def with_sink(
  context: jax.Array, statistics: Statistics, sink: Any
) -> tuple[jax.Array, Statistics]:
  """The context [..., T, E] with one more key: score `sink`, value zero."""
  sink = jnp.asarray(sink, statistics.total.dtype)[..., None]
  shape = statistics.total.shape
  part = from_lse(jnp.broadcast_to(axes.with_rank(sink, len(shape)), shape))
  contexts = context, jnp.zeros_like(context)
  combined, statistics = merged(contexts, (statistics, part))
  return combined.astype(context.dtype), statistics
