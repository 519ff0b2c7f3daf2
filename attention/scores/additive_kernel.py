"""v . tanh(q + k) for every pair, many times faster than its formula.

    tanh(q + k) = 1 - 2 / (1 + G)    with    G = exp(2 q) exp(2 k)

so each channel of a pair costs a division instead of a hyperbolic tangent, and
exponentials are taken once per token. Where all of a tile's projections are
small, G - 1 is computed from exp - 1, which keeps the digits of small sums;
where some are so large that an exponential could overflow, and where there are
few pairs, the formula itself is computed.

CPUs sum channel after channel. GPUs fuse all channels into one kernel. TPUs do
so in the derivative, by the formula itself: the others are not faster there.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from attention import axes

# The fastest on CPUs: with 16 channels in one expression the compiler keeps
# their sum in registers; the derivative writes more and is fastest with 2.
_CHANNELS, _TANGENT_CHANNELS = 16, 2
# On GPUs, so many channels of all pairs of a tile may be in memory.
_GPU_CHANNELS = 4
# With fewer elements than this, a loop over channels is slower.
_SMALL = 1 << 18
# With more pairs than this, the derivative loops over the leading axes: XLA's
# batched products of small matrices are several times slower than single ones.
_MANY_PAIRS = 1 << 12


# Float32 sums must stay float32 on GPUs, where the default is TF32.
_matmul = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


def _of_small(query, key):
  """tanh(q + k) from exp(2 q) - 1 and exp(2 k) - 1."""
  gap = query + key + query * key
  return gap / (gap + 2.0)


def _of_moderate(query, key):
  """tanh(q + k) from exp(2 q) and exp(2 k)."""
  return 1.0 - 2.0 / (1.0 + query * key)


def _of_any(query, key):
  return jnp.tanh(query + key)


# A map of tokens, and tanh(q + k) as a function of mapped tokens.
_FORMS = (
  (lambda tokens: jnp.expm1(2.0 * tokens), _of_small),
  (lambda tokens: jnp.exp(2.0 * tokens), _of_moderate),
  (lambda tokens: tokens, _of_any),
)


@custom_vmap
def _form(query, key):
  """The index of the fastest form that is accurate for all projections."""
  largest = jnp.maximum(
    jnp.max(jnp.abs(query), initial=0.0), jnp.max(jnp.abs(key), initial=0.0)
  )
  # Each exponential must be finite and not 0. NaN takes any form.
  limit = 40.0 if largest.dtype == jnp.float32 else 350.0
  return (largest > 0.5).astype(jnp.int32) + (largest > limit)


@_form.def_vmap
def _form_of_batch(size, is_batched, query, key):
  """One form for all examples, as `jax.lax.switch` would run all forms."""
  del size, is_batched
  return _form(query, key), False


@jax.custom_jvp
def weighted_tanh_sum(
  query: jax.Array, key: jax.Array, weight: jax.Array
) -> jax.Array:
  """sum_a weight[a] tanh(query[t, a] + key[s, a]), [..., t, s].

  `query` [..., t, A] and `key` [..., s, A] are float32 or float64.
  """
  if _pairs_like_tokens(query, key, weight):
    query, key, weight = _by_pair(query, key, weight)
    return _weighted(_of_any(query, key), weight)

  def term(tanh, query, key, weight):
    return weight * tanh(query, key)

  def in_turn(tanh, *channels):
    return _summed(functools.partial(term, tanh), channels, _CHANNELS)

  def at_once(tanh, *channels):
    return jnp.sum(term(tanh, *channels), axis=0)

  channels = _by_channel(query, key, weight)

  def by_form(*channels):
    return _in_best_form(in_turn, channels)

  scores = _on_its_platform(by_form, by_form, at_once, channels)
  return scores.reshape(_scores_shape(query, key, weight))


@functools.partial(weighted_tanh_sum.defjvp, symbolic_zeros=True)
def _weighted_tanh_sum_jvp(primals, tangents):
  query, key, weight = primals
  linear = tuple(
    jnp.zeros(tangent.shape, tangent.dtype)
    if isinstance(tangent, SymbolicZero)
    else tangent
    for tangent in tangents
  )

  # The barrier computes tanh once, not once for every use. The products with
  # ones are broadcasts; their transposes are products too, which are fast.
  @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
  def term(
    tanh, query, key, weight, query_tangent, key_tangent, weight_tangent
  ):
    hidden = jax.lax.optimization_barrier(tanh(query, key))
    across = jnp.ones((1, key.shape[-1]), hidden.dtype)
    down = jnp.ones((query.shape[-2], 1), hidden.dtype)
    sums = _matmul(query_tangent, across) + _matmul(down, key_tangent)
    flat = jnp.reshape(hidden, (*hidden.shape[:-2], 1, -1))
    by_weight = _matmul(weight_tangent, flat)
    by_weight = by_weight.reshape(*by_weight.shape[:-2], *hidden.shape[-2:])
    return weight * (1.0 - hidden * hidden) * sums + by_weight

  scores = weighted_tanh_sum(*primals)
  if _pairs_like_tokens(query, key, weight):
    of_pairs = jax.checkpoint(_tangents_by_pair, prevent_cse=False)
    return scores, of_pairs(*_by_pair(*primals), *_by_pair(*linear))
  channels = (*_by_channel(*primals), *_by_channel(*linear))

  def summed(tanh, *channels):
    return _summed(functools.partial(term, tanh), channels, _TANGENT_CHANNELS)

  def in_turn(tanh, *channels):
    if scores.shape[-2] * scores.shape[-1] < _MANY_PAIRS:
      return summed(tanh, *channels)
    return _mapped_over_leading_axes(functools.partial(summed, tanh), channels)

  @functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
  def at_once(tanh, query, key, weight, *tangents):
    query_tangent, key_tangent, weight_tangent = tangents
    hidden = tanh(query, key)
    slope = weight * (1.0 - hidden * hidden)
    terms = slope * (query_tangent + key_tangent) + weight_tangent * hidden
    return jnp.sum(terms, axis=0)

  def by_form(*channels):
    return _in_best_form(in_turn, channels)

  on_tpu = functools.partial(at_once, _of_any)
  tangent = _on_its_platform(by_form, on_tpu, at_once, channels)
  return scores, tangent.reshape(scores.shape)


def _on_its_platform(on_cpu, on_tpu, at_once, channels):
  """A sum over channels; `at_once` is on GPUs and takes the form first."""
  if _is_small(channels):
    return on_cpu(*channels)

  def on_gpu(tanh, *channels):
    if tanh is not _of_any:
      return at_once(tanh, *channels)
    # XLA does not compute a hyperbolic tangent twice: it writes an array of all
    # pairs and channels.
    groups = _grouped(channels, (-1, _GPU_CHANNELS))

    def step(total, group):
      return total + at_once(tanh, *group), None

    return jax.lax.scan(step, _zeros(channels), groups)[0]

  return jax.lax.platform_dependent(
    *channels,
    cpu=on_cpu,
    tpu=on_tpu,
    default=lambda *channels: _in_best_form(on_gpu, channels),
  )


def _in_best_form(function, channels):
  """function(tanh, *channels), with tokens mapped as `tanh` expects them."""
  query, key, *_ = channels
  if _is_small(channels):
    return function(_of_any, *channels)

  def in_form(prepare, tanh, query, key, *others):
    return function(tanh, prepare(query), prepare(key), *others)

  hold = jax.lax.stop_gradient
  return jax.lax.switch(
    _form(hold(query), hold(key)),
    [functools.partial(in_form, *form) for form in _FORMS],
    *channels,
  )


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

  sums = jax.lax.map(lambda each: function(*each), [*map(entries, channels)])
  return sums.reshape(*leading, *sums.shape[1:])


def _pairs_like_tokens(query, key, weight):
  """Whether an array of all pairs is about as small as the tokens."""
  shape = _scores_shape(query, key, weight)
  if not all(isinstance(size, int) for size in shape):
    return True  # a symbol of `jax.export`
  pairs = math.prod(shape) * query.shape[-1]
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
  """The tangents of the scores, from arrays of `_by_pair`."""
  hidden = jax.lax.optimization_barrier(_of_any(query, key))
  slope = weight * (1.0 - hidden * hidden)
  by_tokens = jnp.sum(slope * (query_tangent + key_tangent), -1)
  return by_tokens + _weighted(hidden, weight_tangent)


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


def _is_small(channels):
  """Whether an array of all pairs and channels is small."""
  shape = jnp.broadcast_shapes(*(array.shape for array in channels))
  return math.prod(shape) <= _SMALL


def _summed(term, channels, at_once):
  """The sum of `term` over the first axis of `channels`."""
  number = channels[0].shape[0]
  if _is_small(channels):
    return jnp.sum(term(*channels), axis=0)
  outer = math.isqrt(-(-number // at_once))
  groups = _grouped(channels, (outer, -1, at_once))

  # Pairwise sums round less than one long sum; `at_once` is a power of 2.
  def step(total, group):
    terms = [term(*(array[n] for array in group)) for n in range(at_once)]
    while len(terms) > 1:
      terms = [left + right for left, right in zip(terms[::2], terms[1::2])]
    return total + terms[0], None

  def outer_step(total, groups):
    partial, _ = jax.lax.scan(step, jnp.zeros_like(total), groups)
    return total + partial, None

  return jax.lax.scan(outer_step, _zeros(channels), groups)[0]


def _grouped(channels, sizes):
  """Channels [A, ...] as [*sizes, ...], one of which is -1, with zeros."""
  number, group = channels[0].shape[0], -math.prod(sizes)
  missing = -number % group

  def grouped(array):
    # Terms of weight 0 add nothing.
    widths = [(0, missing)] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, widths).reshape(*sizes, *array.shape[1:])

  return [*map(grouped, channels)]


def _zeros(channels):
  """Zeros like a sum over channels."""
  zero = axes.varying_zero(channels, channels[0].dtype)
  shape = jnp.broadcast_shapes(*(array.shape[1:] for array in channels))
  return jnp.broadcast_to(zero, shape)
