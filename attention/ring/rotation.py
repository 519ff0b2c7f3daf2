"""The rotation of keys and values around a ring of devices, and its derivative.

Axes: n devices, c chunks of the sequence per device, m blocks of a chunk, t
queries and s keys of a block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.ring.layout import Ring, get, put
from attention.ring.pair_step import PairSteps, as_result
from attention.softmax import merged


def make_rotation(ring: Ring, steps: PairSteps) -> Callable:
  """(parameters, constants, query, key, value) -> contexts and statistics.

  Only reverse-mode first derivatives are defined. `jax.lax.scan`'s derivative
  would store the keys of every step; this one rotates them a second time.
  """

  @jax.custom_vjp
  def rotate(parameters, *arguments):
    del parameters  # `constants.single` holds them too
    return _attend(ring, steps, *arguments)

  def forward(parameters, constants, *tokens):
    results = rotate(parameters, constants, *tokens)
    kept = constants._replace(single=None, empty=None)
    return results, ((parameters, kept, *tokens), results)

  def backward(residuals, cotangents):
    arguments, results = residuals
    return _differentiate(ring, steps, arguments, results, cotangents)

  rotate.defvjp(forward, backward)
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
  return tuple(results)


def _differentiate(
  ring: Ring, steps: PairSteps, arguments, results, cotangents
):
  """The cotangents of `arguments`, summed over all pairs of blocks.

  A row that is NaN contributes nothing, as in `attend`.
  """
  parameters, constants, query, *rotating = arguments
  rows = _finite_rows(results, cotangents)

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
    of_parameters, of_query = state
    totals = [of_parameters, get(of_query, own), *gradients]
    here = jax.tree.map(lambda each: get(each, own), rows)
    tokens = [get(query, own), *key_value]
    totals = steps.add(make_add, totals, numbers, here, tokens)
    of_parameters, of_block, *gradients = totals
    return (of_parameters, put(of_query, of_block, own)), gradients

  differentiated = parameters, query, *rotating
  of_parameters, of_query, *of_rotating = jax.tree.map(
    # Gradients are added up in float32 at least.
    lambda array: jnp.zeros_like(
      array, jnp.promote_types(array.dtype, jnp.float32)
    ),
    differentiated,
  )
  (of_parameters, of_query), of_rotating = _rotate(
    ring, pair_step, (of_parameters, of_query), rotating, of_rotating
  )
  of_parameters, *of_tokens = jax.tree.map(
    lambda total, array: total.astype(array.dtype),
    (of_parameters, of_query, *of_rotating),
    differentiated,
  )
  return of_parameters, None, *of_tokens


def _finite_rows(results, cotangents):
  """Results and cotangents, with zeros for those of NaN."""
  bad = [
    jnp.isnan(results[0]).any(-1, keepdims=True),
    *map(jnp.isnan, results[1:]),
  ]
  return tuple(
    [jnp.where(*each) for each in zip(bad, [0.0] * len(bad), arrays)]
    for arrays in (results, cotangents)
  )


def _rotate(ring: Ring, pair_step: Callable, state, rotating, gradients):
  """Rotates arrays around the ring; calls `pair_step` for each pair of blocks.

  `pair_step` is (state, gradients, key_value, own, numbers) -> state and
  gradients. `key_value` are the rotating blocks and `gradients` their
  gradients, `own` the index of this device's query block, and `numbers` the
  indices of both blocks in the sequence. The state is not rotated; each
  gradient returns to the device that it started on.
  """

  def rotate_block(carry, block):
    state, gradients = carry
    index = {-3: block}

    def step(carry, number):
      state, moving, moving_gradients = carry
      following = ring.rotated(moving)

      def attend_to_chunk(carry, chunk):
        state, all_gradients = carry
        key_value = [get(each, {-3: chunk}) for each in moving]
        key_number = ring.key_number(chunk, block, number)

        def attend_to_block(carry, own):
          numbers = ring.query_number(*own), key_number
          own = {-4: own[0], -3: own[1]}
          return pair_step(*carry, key_value, own, numbers), None

        here = [get(each, {-3: chunk}) for each in all_gradients]
        (state, here), _ = jax.lax.scan(
          attend_to_block, (state, here), ring.query_blocks
        )
        new = [put(*each, {-3: chunk}) for each in zip(all_gradients, here)]
        return (state, new), None

      chunks = jnp.arange(ring.keys.chunks, dtype=jnp.int32)
      (state, moving_gradients), _ = jax.lax.scan(
        attend_to_chunk, (state, moving_gradients), chunks
      )
      return (state, following, ring.rotated(moving_gradients)), None

    moving, moving_gradients = (
      [get(each, index) for each in arrays] for arrays in (rotating, gradients)
    )
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
