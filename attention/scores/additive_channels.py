"""The projections of an additive score by channel, and sums over them."""

import math

import jax
import jax.numpy as jnp

from attention.arrays import axes

# The fastest on CPUs: with 16 terms in one expression the compiler keeps their
# sum in registers. XLA moves slices of fewer terms into the expression, which
# then uses no vector instructions.
TERMS = 16
# More groups of terms are summed in two levels.
_GROUPS = 16
# With fewer elements than this, a loop over channels is slower.
_SMALL = 1 << 18


def scores_shape(query, key, weight):
  """The shape of the scores of [..., t, A], [..., s, A] and [..., A]."""
  leading = jnp.broadcast_shapes(
    query.shape[:-2], key.shape[:-2], weight.shape[:-1]
  )
  return (*leading, query.shape[-2], key.shape[-2])


def by_pair(query, key, weight):
  """As [..., t, 1, A], [..., 1, s, A] and [..., 1, 1, A], of equal rank."""
  arrays = axes.aligned(
    query[..., :, None, :], key[..., None, :, :], weight[..., None, None, :]
  )
  dtype = jnp.result_type(*arrays)
  return [array.astype(dtype) for array in arrays]


def by_channel(query, key, weight):
  """As [A, ..., t, 1], [A, ..., 1, s] and [A, ..., 1, 1], of equal rank."""
  # Leading axes of size 1 are removed, because XLA's products are slow with
  # them.
  arrays = by_pair(query, key, weight)
  single = tuple(
    axis
    for axis in range(arrays[0].ndim - 3)
    if all(array.shape[axis] == 1 for array in arrays)
  )
  return [jnp.moveaxis(jnp.squeeze(each, single), -1, 0) for each in arrays]


def is_small(channels):
  """Whether an array of all pairs and channels is small."""
  shape = jnp.broadcast_shapes(*(array.shape for array in channels))
  return math.prod(shape) <= _SMALL


def sum_in_turn(of_group, channels):
  """The sum of `of_group` over groups of `TERMS` channels, in a loop."""
  outer = -(-channels[0].shape[0] // (TERMS * _GROUPS))
  groups = in_groups(channels, (outer, -1, TERMS))

  def step(total, group):
    return total + of_group(group), None

  def outer_step(total, groups):
    return total + jax.lax.scan(step, jnp.zeros_like(total), groups)[0], None

  # Partial sums round less than one long sum.
  if outer == 1:
    return jax.lax.scan(step, zeros(channels), [each[0] for each in groups])[0]
  return jax.lax.scan(outer_step, zeros(channels), groups)[0]


def sum_of_terms(term, group):
  """The sum of `term` over the first axis, `TERMS` long, in one expression."""
  return pairwise_sum(
    [term(*(array[n] for array in group)) for n in range(TERMS)]
  )


def pairwise_sum(terms):
  """The sum of arrays, as many as a power of 2, in one expression."""
  # Pairwise sums round less than one long sum.
  while len(terms) > 1:
    terms = [left + right for left, right in zip(terms[::2], terms[1::2])]
  return terms[0]


def in_groups(channels, sizes):
  """Arrays [A, ...] as [*sizes, ...], one of which is -1, with zeros."""
  number, group = channels[0].shape[0], -math.prod(sizes)
  missing = -number % group

  def of(array):
    # Terms of weight 0 add nothing.
    widths = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, widths).reshape(*sizes, *array.shape[1:])

  return [*map(of, channels)]


def zeros(channels):
  """Zeros like a sum over channels."""
  zero = axes.varying_zero(channels, channels[0].dtype)
  shape = jnp.broadcast_shapes(*(array.shape[1:] for array in channels))
  return jnp.broadcast_to(zero, shape)
