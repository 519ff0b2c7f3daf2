"""The derivative of the additive score, and its transpose on CPUs.

Cotangents of the tokens are sums over all pairs for each channel. Each needs a
division per pair and channel if its terms are added to an
array of the tokens, with the other tokens one after another:

    of_query[:, t] = sum_s cotangent[s, t] slope(query[:, t], key[:, s])
"""

import functools

import jax
import jax.numpy as jnp

from attention.scores.additive_channels import (
  TERMS,
  in_groups,
  is_small,
  sum_in_turn,
  sum_of_terms,
  zeros,
)
from attention.transforms.custom_transpose import with_transpose


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def _tangent_terms(tanh, *channels):
  """The tangent of each channel's term of the scores."""
  query, key, weight, query_tangent, key_tangent, weight_tangent = channels
  hidden = tanh(query, key)
  slope = weight * (1.0 - hidden * hidden)
  return slope * (query_tangent + key_tangent) + weight_tangent * hidden


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=0)
def tangent_at_once(tanh, *channels):
  """The tangent of the scores, [..., t, s], with all channels in one sum."""
  # `channels` are the query, key and weight by channel, and their tangents.
  return jnp.sum(_tangent_terms(tanh, *channels), axis=0)


def tangent_in_turn(tanh, *channels):
  """`tangent_at_once`, one channel after another."""
  if is_small(channels):
    return tangent_at_once(tanh, *channels)

  def tangent(primals, tangents):
    terms = functools.partial(_tangent_terms, tanh)
    of_group = functools.partial(sum_of_terms, terms)
    return [sum_in_turn(of_group, (*primals, *tangents))]

  transpose = functools.partial(_cotangents, tanh)
  return with_transpose(tangent, transpose, [*channels[:3]], [*channels[3:]])[0]


def _cotangents(tanh, primals, cotangents):
  """The transpose of `tangent_in_turn`, for the cotangent [..., t, s]."""
  query, key, weight = primals
  (of_scores,) = cotangents
  queries, keys = query[..., 0], key[..., 0, :]
  by_query = _sum_over(
    keys, tanh, _slope_and_value, queries, jnp.moveaxis(of_scores, -1, 0)
  )
  by_key = _sum_over(
    queries, tanh, _slope, keys, jnp.moveaxis(of_scores, -2, 0)
  )
  by_weight = jnp.sum(by_query.imag, axis=-1)
  return [
    _sum_like(query, weight * by_query.real[..., None]),
    _sum_like(key, weight * by_key[..., None, :]),
    _sum_like(weight, by_weight[..., None, None]),
  ]


def _slope(hidden, cotangent):
  return cotangent * (1.0 - hidden * hidden)


def _slope_and_value(hidden, cotangent):
  # XLA's CPU backend computes `hidden` again for each of two sums, but once for
  # the two parts of a complex sum.
  return jax.lax.complex(_slope(hidden, cotangent), cotangent * hidden)


def _sum_over(others, tanh, term, tokens, cotangents):
  """sum_s term(tanh(tokens, others[..., s]), cotangents[s]), [A, ..., t]."""
  # Tokens are [A, ..., t], others [A, ..., s], cotangents [s, ..., t].
  arrays = jnp.moveaxis(others, -1, 0)[..., None], cotangents[:, None]

  def of_one(other, cotangent):
    return term(tanh(tokens, other), cotangent)

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def step(total, group):
    return total + sum_of_terms(of_one, group), None

  none = zeros((tokens[None], *arrays))
  dtype = jax.eval_shape(term, none, none).dtype
  groups = in_groups(arrays, (-1, TERMS))
  return jax.lax.scan(step, none.astype(dtype), groups)[0]


def _sum_like(array, terms):
  """The sum over the axes along which `array` has size 1."""
  axes = tuple(
    axis
    for axis, sizes in enumerate(zip(array.shape, terms.shape))
    if sizes[0] != sizes[1]
  )
  return jnp.sum(terms, axis=axes, keepdims=True)
