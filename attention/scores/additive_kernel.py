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

from attention.scores.additive_channels import (
  by_channel,
  by_pair,
  in_groups,
  is_small,
  scores_shape,
  sum_in_turn,
  zeros,
)
from attention.scores.additive_derivative import (
  tangent_at_once,
  tangent_in_turn,
)

# On GPUs, so many channels of all pairs of a tile may be in memory.
_GPU_CHANNELS = 4

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
  """sum_a weight[a] tanh(query[t, a] + key[s, a]), [..., t, s]."""
  # `query` [..., t, A] and `key` [..., s, A] are float32 or float64.
  if _pairs_like_tokens(query, key, weight):
    query, key, weight = by_pair(query, key, weight)
    return _weighted(_of_any(query, key), weight)

  def term(tanh, query, key, weight):
    return weight * tanh(query, key)

  def in_turn(tanh, *channels):
    return sum_in_turn(functools.partial(term, tanh), channels)

  def at_once(tanh, *channels):
    return jnp.sum(term(tanh, *channels), axis=0)

  channels = by_channel(query, key, weight)

  def by_form(*channels):
    return _in_best_form(in_turn, channels)

  scores = _on_its_platform(by_form, by_form, at_once, channels)
  return scores.reshape(scores_shape(query, key, weight))


@functools.partial(weighted_tanh_sum.defjvp, symbolic_zeros=True)
def _weighted_tanh_sum_jvp(primals, tangents):
  query, key, weight = primals
  linear = tuple(
    jnp.zeros(tangent.shape, tangent.dtype)
    if isinstance(tangent, SymbolicZero)
    else tangent
    for tangent in tangents
  )

  scores = weighted_tanh_sum(*primals)
  if _pairs_like_tokens(query, key, weight):
    of_pairs = jax.checkpoint(_tangents_by_pair, prevent_cse=False)
    return scores, of_pairs(*by_pair(*primals), *by_pair(*linear))

  def by_form(*channels):
    return _in_best_form(tangent_in_turn, channels)

  on_tpu = functools.partial(tangent_at_once, _of_any)
  channels = (*by_channel(*primals), *by_channel(*linear))
  tangent = _on_its_platform(by_form, on_tpu, tangent_at_once, channels)
  return scores, tangent.reshape(scores.shape)


def _on_its_platform(on_cpu, on_tpu, at_once, channels):
  """A sum over channels; `at_once` is on GPUs and takes the form first."""
  if is_small(channels):
    return on_cpu(*channels)

  def on_gpu(tanh, *channels):
    if tanh is not _of_any:
      return at_once(tanh, *channels)
    # XLA does not compute a hyperbolic tangent twice: it writes an array of all
    # pairs and channels.
    groups = in_groups(channels, (-1, _GPU_CHANNELS))

    def step(total, group):
      return total + at_once(tanh, *group), None

    return jax.lax.scan(step, zeros(channels), groups)[0]

  return jax.lax.platform_dependent(
    *channels,
    cpu=on_cpu,
    tpu=on_tpu,
    default=lambda *channels: _in_best_form(on_gpu, channels),
  )


def _in_best_form(function, channels):
  """function(tanh, *channels), with tokens mapped as `tanh` expects them."""
  query, key, *_ = channels
  if is_small(channels):
    return function(_of_any, *channels)

  def in_form(prepare, tanh, query, key, *others):
    return function(tanh, prepare(query), prepare(key), *others)

  hold = jax.lax.stop_gradient
  return jax.lax.switch(
    _form(hold(query), hold(key)),
    [functools.partial(in_form, *form) for form in _FORMS],
    *channels,
  )


def _pairs_like_tokens(query, key, weight):
  """Whether an array of all pairs is about as small as the tokens."""
  shape = scores_shape(query, key, weight)
  if not all(isinstance(size, int) for size in shape):
    return True  # a symbol of `jax.export`
  pairs = math.prod(shape) * query.shape[-1]
  return pairs <= 2 * (query.size + key.size)


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
