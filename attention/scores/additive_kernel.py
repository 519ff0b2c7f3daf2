"""v . tanh(q + k) for every pair, from exponentials of q and k.

    tanh(q + k) = 1 - 2 r    with    r = 1 / (1 + (exp(q) exp(k))^2)

so each channel of a pair costs a division instead of a hyperbolic tangent, and
as d tanh = 4 (r - r^2), the derivative needs only r too. Exponentials are taken
once per token.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from attention import axes

# The fastest on CPUs: with 16 channels in one expression the compiler keeps
# their sum in registers; the derivative writes more and is fastest with 2.
_CHANNELS, _TANGENT_CHANNELS = 16, 2
# With fewer elements than this, a loop over channels is slower.
_SMALL = 1 << 18
# With more pairs than this, the derivative loops over the leading axes: XLA's
# batched products of small matrices are several times slower than single ones.
_MANY_PAIRS = 1 << 12


# Float32 sums must stay float32 on GPUs, where the default is TF32.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def exponentials(tokens: jax.Array) -> jax.Array:
  """exp(tokens), float32 at least, for `weighted_tanh_sum`.

  Float32 tokens are clipped to +-80, so that a product of two is finite.
  """
  tokens = tokens.astype(jnp.promote_types(tokens.dtype, jnp.float32))
  bound = 80.0 if tokens.dtype == jnp.float32 else 350.0
  return jnp.exp(jnp.clip(tokens, -bound, bound))


@jax.custom_jvp
def weighted_tanh_sum(
  query: jax.Array, key: jax.Array, weight: jax.Array
) -> jax.Array:
  """sum_a weight[a] tanh(log(query[t, a]) + log(key[s, a])), [..., t, s].

  `query` [..., t, A] and `key` [..., s, A] are from `exponentials`.
  """
  if _pairs_like_tokens(query, key, weight):
    query, key, weight = _by_pair(query, key, weight)
    return _weighted(1.0 - 2.0 * _share(query, key), weight)

  def term(query, key, weight):
    return weight - (2.0 * weight) * _share(query, key)

  channels = _by_channel(query, key, weight)
  scores = _summed(term, channels, _CHANNELS)
  return scores.reshape(_scores_shape(query, key, weight))


@functools.partial(weighted_tanh_sum.defjvp, symbolic_zeros=True)
def _weighted_tanh_sum_jvp(primals, tangents):
  query, key, weight = primals
  query_tangent, key_tangent, weight_tangent = (
    jnp.zeros(tangent.shape, tangent.dtype)
    if isinstance(tangent, SymbolicZero)
    else tangent
    for tangent in tangents
  )

  # The barrier computes r once, not once for every use. The products with ones
  # are broadcasts; their transposes are products too, which are fast.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def term(query, key, weight, query_tangent, key_tangent, weight_tangent):
    share = jax.lax.optimization_barrier(_share(query, key))
    across = jnp.ones((1, key.shape[-1]), share.dtype)
    down = jnp.ones((query.shape[-2], 1), share.dtype)
    hidden = _matmul(query_tangent, across) + _matmul(down, key_tangent)
    slope = (4.0 * weight) * (share - share * share)
    flat = jnp.reshape(share, (*share.shape[:-2], 1, -1))
    by_weight = _matmul(-2.0 * weight_tangent, flat)
    by_weight = by_weight.reshape(*by_weight.shape[:-2], *share.shape[-2:])
    return slope * hidden + (weight_tangent + by_weight)

  # d log(x) = dx / x, once per token.
  query_tangent = query_tangent / _nonzero(query)
  key_tangent = key_tangent / _nonzero(key)
  linear = (query_tangent, key_tangent, weight_tangent)
  scores = weighted_tanh_sum(*primals)
  if _pairs_like_tokens(query, key, weight):
    of_pairs = jax.checkpoint(_tangents_by_pair, prevent_cse=False)
    return scores, of_pairs(*_by_pair(*primals), *_by_pair(*linear))
  channels = (*_by_channel(*primals), *_by_channel(*linear))

  def summed(*channels):
    return _summed(term, channels, _TANGENT_CHANNELS)

  if scores.shape[-2] * scores.shape[-1] < _MANY_PAIRS:
    tangent = summed(*channels)
  else:
    tangent = _mapped_over_leading_axes(summed, channels)
  return scores, tangent.reshape(scores.shape)


def _mapped_over_leading_axes(function, channels):
  """Applies `function` to one leading entry after another: [L, t, s]."""
  leading = jnp.broadcast_shapes(*(array.shape[1:-2] for array in channels))
  if math.prod(leading) == 1:
    return function(*channels)

  def entries(array):
    number, *_, rows, columns = array.shape
    full = jnp.broadcast_to(array, (number, *leading, rows, columns))
    flat = full.reshape(number, -1, rows, columns)
    return jnp.moveaxis(flat, 1, 0)

  return jax.lax.map(lambda each: function(*each), [*map(entries, channels)])


def _pairs_like_tokens(query, key, weight):
  """Whether an array of all pairs is about as small as the tokens."""
  pairs = math.prod(_scores_shape(query, key, weight)) * query.shape[-1]
  return pairs <= 2 * (query.size + key.size)


def _by_pair(query, key, weight):
  """As [..., t, 1, A], [..., 1, s, A] and [..., 1, 1, A], of equal rank."""
  arrays = axes.aligned(
    query[..., :, None, :], key[..., None, :, :], weight[..., None, None, :]
  )
  dtype = jnp.result_type(*arrays)
  return [array.astype(dtype) for array in arrays]


def _weighted(hidden, weight):
  """The sums over the last axis of hidden * weight."""
  return _matmul(hidden, jnp.swapaxes(weight, -1, -2))[..., 0]


def _tangents_by_pair(
  query, key, weight, query_tangent, key_tangent, weight_tangent
):
  """Tangents of the scores from those of log(query), log(key) and weight."""
  share = jax.lax.optimization_barrier(_share(query, key))
  slope = (4.0 * weight) * (share - share * share)
  hidden = jnp.sum(slope * (query_tangent + key_tangent), -1)
  by_weight = -2.0 * _weighted(share, weight_tangent)
  return hidden + (jnp.sum(weight_tangent, -1) + by_weight)


def _nonzero(exponentials):
  """Replaces zeros, which only unused cache entries hold, by ones."""
  return jnp.where(exponentials == 0.0, 1.0, exponentials)


def _share(query, key):
  """The value r of the module docstring, for every pair."""
  product = query * key
  return 1.0 / (1.0 + product * product)


def _scores_shape(query, key, weight):
  leading = jnp.broadcast_shapes(
    query.shape[:-2], key.shape[:-2], weight.shape[:-1]
  )
  return (*leading, query.shape[-2], key.shape[-2])


def _by_channel(query, key, weight):
  """As [A, ..., t, 1], [A, ..., 1, s] and [A, ..., 1, 1], of equal rank.

  Leading axes of size 1 are removed, because XLA's products are slow with them.
  """
  arrays = _by_pair(query, key, weight)
  single = tuple(
    axis
    for axis in range(arrays[0].ndim - 3)
    if all(array.shape[axis] == 1 for array in arrays)
  )
  return [jnp.moveaxis(jnp.squeeze(each, single), -1, 0) for each in arrays]


def _summed(term, channels, at_once):
  """The sum of `term` over the first axis of `channels`."""
  number = channels[0].shape[0]
  shape = jnp.broadcast_shapes(*(array.shape[1:] for array in channels))
  if number * math.prod(shape) <= _SMALL:
    return jnp.sum(term(*channels), axis=0)
  outer = math.isqrt(-(-number // at_once))
  inner = -(-number // (at_once * outer))
  # exp(0) * exp(0) with weight 0 adds nothing.
  missing = outer * inner * at_once - number

  def grouped(array, fill):
    widths = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
    padded = jnp.pad(array, widths, constant_values=fill)
    return padded.reshape(outer, inner, at_once, *array.shape[1:])

  fills = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
  groups = [grouped(*each) for each in zip(channels, fills)]

  # Pairwise sums round less than one long sum; `at_once` is a power of 2.
  def step(total, group):
    terms = [term(*(array[n] for array in group)) for n in range(at_once)]
    while len(terms) > 1:
      terms = [left + right for left, right in zip(terms[::2], terms[1::2])]
    return total + terms[0], None

  def outer_step(total, groups):
    partial, _ = jax.lax.scan(step, jnp.zeros_like(total), groups)
    return total + partial, None

  zero = axes.varying_zero(channels, channels[0].dtype)
  return jax.lax.scan(outer_step, jnp.broadcast_to(zero, shape), groups)[0]
