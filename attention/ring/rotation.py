"""The journey of keys and values around a ring of devices, and its derivative.

Axes: n devices, c chunks of the sequence a device, m pieces of a chunk, t
queries and s keys of a piece.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attention.merging import merge
from attention.ring.layout import Ring, get, put
from attention.ring.pair_step import Parts


def make_travel(ring: Ring, parts: Parts) -> Callable:
  """Makes the function that sends keys and values around a ring.

  First derivatives in reverse mode: `jax.lax.scan` would keep the keys of each
  step, which are all of them; here they travel once more.

  Args:
    ring: the devices.
    parts: what happens where two pieces meet.

  Returns:
    (parameters, constants, query, key, value) -> contexts [..., c, m, t, E] and
    lses [..., c, m, t, 1], of tokens [..., c, m, t, D].
  """

  @jax.custom_vjp
  def travel(parameters, *arguments):
    del parameters  # which the constants hold once more
    return _attend(ring, parts, *arguments)

  def forward(parameters, constants, *tokens):
    found = travel(parameters, constants, *tokens)
    kept = constants._replace(alone=None, nothing=None)
    return found, ((parameters, kept, *tokens), found)

  def backward(kept, cotangents):
    arguments, found = kept
    return _differentiate(ring, parts, arguments, found, cotangents)

  travel.defvjp(forward, backward)
  return travel


def _attend(ring: Ring, parts: Parts, constants, *tokens):
  """The contexts and lses of this device's queries."""
  query, *travellers = tokens

  def attending(case):
    def add(found, *arguments):
      new = parts.alone(case, constants, *arguments)
      (contexts, lses), (context, lse) = found, new
      context, lse = merge([contexts, context], [lses[..., 0], lse])
      return [context, lse[..., None]]

    return add

  def visit(found, gathered, met, mine, numbers):
    here = [get(each, mine) for each in found]
    here = parts.add(attending, here, numbers, get(query, mine), *met)
    return [put(*each, mine) for each in zip(found, here)], gathered

  found, _ = _voyage(ring, visit, constants.nothing, travellers, [])
  return tuple(found)


def _differentiate(ring: Ring, parts: Parts, arguments, found, cotangents):
  """The cotangents of `arguments`, sums over the parts.

  Of a row that is NaN nothing comes back, as in `attend`.
  """
  parameters, constants, query, *travellers = arguments
  rows = _by_row(found, cotangents)

  def differentiating(case):
    def add(totals, rows, tokens, *numbers):
      context, lse, by_context, by_lse = rows

      def met(parameters, *tokens):
        return parts.of_whole(
          case, parameters, constants, *tokens, *numbers, context, lse[..., 0]
        )

      _, back = jax.vjp(met, parameters, *tokens)
      new = back((by_context, by_lse[..., 0]))
      return jax.tree.map(_plus, totals, list(new))

    return add

  def visit(state, gathered, met, mine, numbers):
    by_parameters, by_query = state
    totals = [by_parameters, get(by_query, mine), *gathered]
    here = [get(each, mine) for each in rows]
    tokens = [get(query, mine), *met]
    totals = parts.add(differentiating, totals, numbers, here, tokens)
    by_parameters, by_here, *gathered = totals
    return (by_parameters, put(by_query, by_here, mine)), gathered

  differentiated = parameters, query, *travellers
  by_parameters, by_query, *by_met = jax.tree.map(_wide_zeros, differentiated)
  (by_parameters, by_query), by_met = _voyage(
    ring, visit, (by_parameters, by_query), travellers, by_met
  )
  by_parameters, *by_tokens = jax.tree.map(
    lambda total, array: total.astype(array.dtype),
    (by_parameters, by_query, *by_met),
    differentiated,
  )
  return by_parameters, None, *by_tokens


def _by_row(found, cotangents):
  """What is found, finite but for lses of -inf, and its cotangents."""
  (contexts, lses), (by_contexts, by_lses) = found, cotangents
  lost, unknown = jnp.isnan(contexts).any(-1, keepdims=True), jnp.isnan(lses)
  return (
    jnp.where(lost, 0.0, contexts),
    jnp.where(unknown, -jnp.inf, lses),
    jnp.where(lost, 0.0, by_contexts),
    jnp.where(unknown, 0.0, by_lses),
  )


def _voyage(ring: Ring, visit: Callable, state, travellers, arrived):
  """Sends arrays around the ring, and calls `visit` wherever pieces meet.

  Args:
    ring: the devices.
    visit: (state, gathered, met, mine, numbers) -> state and gathered; `met`
      are pieces [..., s, D] that travel, `gathered` what these have gathered,
      `mine` is the place of this device's piece, and `numbers` tells where the
      two stand in the sequence.
    state: what stays on the device.
    travellers: [..., c, m, s, D] arrays, of which one piece of each chunk
      travels at a time.
    arrived: arrays for what these gather on the way.

  Returns:
    The last state, and `arrived` once all are home.
  """

  def depart(carry, departure):
    state, arrived = carry
    place = {-3: departure}

    def turn(carry, step):
      state, travelling, gathered = carry
      following = ring.passed_on(travelling)

      def receive(carry, chunk):
        state, gathered = carry
        met = [get(each, {-3: chunk}) for each in travelling]
        number = ring.met_number(chunk, departure, step)

        def meet(carry, mine):
          numbers = ring.own_number(*mine), number
          return visit(*carry, met, {-4: mine[0], -3: mine[1]}, numbers), None

        here = [get(each, {-3: chunk}) for each in gathered]
        (state, here), _ = jax.lax.scan(meet, (state, here), ring.places)
        gathered = [put(*each, {-3: chunk}) for each in zip(gathered, here)]
        return (state, gathered), None

      chunks = jnp.arange(ring.met.chunks, dtype=jnp.int32)
      (state, gathered), _ = jax.lax.scan(receive, (state, gathered), chunks)
      return (state, following, ring.passed_on(gathered)), None

    travelling, gathered = (
      [get(each, place) for each in arrays] for arrays in (travellers, arrived)
    )
    (state, _, gathered), _ = jax.lax.scan(
      turn, (state, travelling, gathered), ring.steps
    )
    arrived = [put(*each, place) for each in zip(arrived, gathered)]
    return (state, arrived), None

  departures = jnp.arange(ring.met.each, dtype=jnp.int32)
  (state, arrived), _ = jax.lax.scan(depart, (state, arrived), departures)
  return state, arrived


def _wide_zeros(array):
  """Zeros to add gradients to, float32 at least."""
  dtype = jnp.promote_types(array.dtype, jnp.float32)
  return jnp.zeros_like(array, dtype)


def _plus(total, array):
  return total + array.astype(total.dtype)
