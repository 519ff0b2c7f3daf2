"""The rotation of keys and values around a ring, and its derivative.

Axes: c chunks per device, m blocks per chunk, t queries and s keys of a block.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.arrays.softmax import merged
from attention.ring.layout import Ring, get, put
from attention.ring.pair_step import PairSteps, as_result
from attention.transforms.custom_transpose import with_transpose
from attention.transforms.tangent_rule import instantiated, with_tangent_rule


def make_rotation(ring: Ring, steps: PairSteps) -> Callable:
  """(parameters, constants, query, key, value) -> contexts and statistics."""

  # The derivative of `jax.lax.scan` would store the keys of every step. These
  # functions rotate them again, in forward and in reverse mode.
  def rotate(*arguments):
    return with_tangent_rule(function, rule, *arguments)

  def function(parameters, *arguments):
    del parameters  # `constants.single` contains the same arrays
    return _attend(ring, steps, *arguments)

  def rule(primals, tangents):
    results = rotate(*primals)
    parameters, constants, *tokens = primals
    kept = constants._replace(single=None, empty=None)
    residuals, structure = jax.tree.flatten(
      ((parameters, kept, *tokens), results)
    )
    of_arguments, of_differentiable = jax.tree.flatten(
      jax.tree.map(instantiated, (tangents[0], *tangents[2:]))
    )

    def forward(residuals, tangents):
      arguments, results = jax.tree.unflatten(structure, residuals)
      tangents = jax.tree.unflatten(of_differentiable, tangents)
      return _tangents(ring, steps, arguments, results, tangents)

    def reverse(residuals, cotangents):
      arguments, results = jax.tree.unflatten(structure, residuals)
      return jax.tree.leaves(
        _cotangents(ring, steps, arguments, results, cotangents)
      )

    return results, with_transpose(forward, reverse, residuals, of_arguments)

  return rotate


def _attend(ring: Ring, steps: PairSteps, constants, *tokens):
  """The contexts and the statistics of this device's queries."""
  query, *rotating = tokens

  def make_merge(case):
    def merge_pair(results, *arguments):
      before = as_result(results)
      new = steps.single(case, constants, *arguments)
      context, statistics = merged([before[0], new[0]], [before[1], new[1]])
      return [context, *(each[..., None] for each in statistics)]

    return merge_pair

  def pair_step(results, gradients, key_value, own, numbers):
    here = [get(each, own) for each in results]
    here = steps.add(make_merge, here, numbers, get(query, own), *key_value)
    return [put(*each, own) for each in zip(results, here)], gradients

  results, _ = _rotate(ring, pair_step, constants.empty, rotating, [])
  return results


def _tangents(ring: Ring, steps: PairSteps, arguments, results, tangents):
  """The tangents of `results`; that of a row that is NaN is zero."""
  parameters, constants, query, *rotating = arguments
  d_parameters, d_query, *d_rotating = tangents
  are_nan = _are_nan(results)
  rows = _zeros_where(are_nan, results)

  def make_add(case):
    def add(totals, rows, tokens, d_tokens, *numbers):
      def pair(parameters, *tokens):
        context, statistics = steps.combined(
          case, parameters, constants, *tokens, *numbers, *as_result(rows)
        )
        return [context, *(each[..., None] for each in statistics)]

      primals, tangents = (parameters, *tokens), (d_parameters, *d_tokens)
      return [*map(jnp.add, totals, jax.jvp(pair, primals, tangents)[1])]

    return add

  def pair_step(totals, gradients, moving, own, numbers):
    key_value, of_key_value = moving[:2], moving[2:]
    here, of_rows = ([get(each, own) for each in x] for x in (totals, rows))
    tokens = [get(query, own), *key_value]
    of_tokens = [get(d_query, own), *of_key_value]
    here = steps.add(make_add, here, numbers, of_rows, tokens, of_tokens)
    return [put(*each, own) for each in zip(totals, here)], gradients

  zeros = [jnp.zeros_like(each) for each in rows]
  totals, _ = _rotate(ring, pair_step, zeros, [*rotating, *d_rotating], [])
  return _zeros_where(are_nan, totals)


def _cotangents(ring: Ring, steps: PairSteps, arguments, results, cotangents):
  """The cotangents of parameters and tokens, the transpose of `_tangents`."""
  parameters, constants, query, *rotating = arguments
  are_nan = _are_nan(results)
  rows = [_zeros_where(are_nan, each) for each in (results, cotangents)]

  def make_add(case):
    def add(totals, rows, tokens, *numbers):
      combined, cotangents = map(as_result, rows)

      def pair(parameters, *tokens):
        return steps.combined(
          case, parameters, constants, *tokens, *numbers, *combined
        )

      _, vjp = jax.vjp(pair, parameters, *tokens)
      new = vjp(cotangents)
      return jax.tree.map(
        lambda total, array: total + array.astype(total.dtype),
        totals,
        list(new),
      )

    return add

  def pair_step(state, gradients, key_value, own, numbers):
    d_parameters, d_query = state
    totals = [d_parameters, get(d_query, own), *gradients]
    here = jax.tree.map(lambda each: get(each, own), rows)
    tokens = [get(query, own), *key_value]
    totals = steps.add(make_add, totals, numbers, here, tokens)
    d_parameters, d_block, *gradients = totals
    return (d_parameters, put(d_query, d_block, own)), gradients

  differentiated = parameters, query, *rotating
  d_parameters, d_query, *d_rotating = jax.tree.map(
    # Gradients are summed in float32 at least.
    lambda array: jnp.zeros_like(
      array, jnp.promote_types(array.dtype, jnp.float32)
    ),
    differentiated,
  )
  (d_parameters, d_query), d_rotating = _rotate(
    ring, pair_step, (d_parameters, d_query), rotating, d_rotating
  )
  return jax.tree.map(
    lambda total, array: total.astype(array.dtype),
    (d_parameters, d_query, *d_rotating),
    differentiated,
  )


def _are_nan(results):
  """Which rows of each result are NaN."""
  context, *statistics = results
  are_nan = jnp.isnan(context).any(-1, keepdims=True)
  return [are_nan, *map(jnp.isnan, statistics)]


def _zeros_where(are_nan, arrays):
  """The arrays, with zeros in rows that are NaN."""
  return [jnp.where(each, 0.0, array) for each, array in zip(are_nan, arrays)]


def _rotate(ring: Ring, pair_step: Callable, state, rotating, gradients):
  """Rotates arrays around the ring; `pair_step` handles a pair of blocks."""
  # `pair_step` is (state, gradients, key_value, own, numbers) -> state and
  # gradients; `own` is the index of this device's query block, and `numbers`
  # are those of both blocks in the sequence. Only `rotating` and `gradients`
  # rotate.

  def attend_to_pair(carry, pair, *, moving, block, number):
    state, gradients = carry
    key_chunk, query_chunk, query_block = pair
    index = {-3: key_chunk}
    numbers = (
      ring.query_number(query_chunk, query_block),
      ring.key_number(key_chunk, block, number),
    )
    key_value = [get(each, index) for each in moving]
    here = [get(each, index) for each in gradients]
    own = {-4: query_chunk, -3: query_block}
    state, here = pair_step(state, here, key_value, own, numbers)
    return (state, [put(*each, index) for each in zip(gradients, here)]), None

  def rotate_block(carry, block):
    state, gradients = carry
    index = {-3: block}

    def step(carry, number):
      state, moving, gradients = carry
      attend = functools.partial(
        attend_to_pair, moving=moving, block=block, number=number
      )
      (state, gradients), _ = jax.lax.scan(
        attend, (state, gradients), ring.pairs
      )
      return (state, ring.rotated(moving), ring.rotated(gradients)), None

    moving = [get(each, index) for each in rotating]
    moving_gradients = [get(each, index) for each in gradients]
    (state, _, moving_gradients), _ = jax.lax.scan(
      step,
      (state, moving, moving_gradients),
      jnp.arange(ring.size, dtype=jnp.int32),
    )
    gradients = [put(*each, index) for each in zip(gradients, moving_gradients)]
    return (state, gradients), None

  blocks = jnp.arange(ring.keys.blocks_per_chunk, dtype=jnp.int32)
  (state, gradients), _ = jax.lax.scan(rotate_block, (state, gradients), blocks)
  return state, gradients
