"""The journey of keys and values around a ring of devices, and its derivative.

Axes: n devices, c chunks of the sequence a device, m pieces of a chunk, t
queries and s keys of a piece.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.merging import merge
from attention.pairwise import EMPTY, FULL
from attention.ring.layout import Ring, get, put


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
  """What a piece of queries finds in a piece of keys.

  Attributes:
    table: EMPTY, PARTIAL or FULL for all pairs of pieces of the sequence.
    part: (case, parameters, constants, query, key, value, row, column) ->
      context and lse of two pieces, which the table calls so.
  """

  table: np.ndarray
  part: Callable

  def add(self, make: Callable, total, numbers, *arguments):
    """make(case)(total, *arguments, *numbers); of what is EMPTY, the total."""

    def branch(case):
      return (lambda total, *_: total) if case == EMPTY else make(case)

    cases = [int(case) for case in np.unique(self.table)]
    operands = (total, *arguments, *numbers)
    if len(cases) == 1:
      return branch(cases[0])(*operands)
    branches = np.searchsorted(cases, self.table).astype(np.int32)
    chosen = jnp.asarray(branches)[numbers]
    return jax.lax.switch(chosen, [branch(case) for case in cases], *operands)


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
  def travel(*arguments):
    return _attend(ring, parts, *arguments)

  def forward(*arguments):
    found = travel(*arguments)
    return found, (arguments, found)

  def backward(kept, cotangents):
    arguments, found = kept
    return _differentiate(ring, parts, arguments, found, cotangents)

  travel.defvjp(forward, backward)
  return travel


def _attend(ring: Ring, parts: Parts, parameters, constants, *tokens):
  """The contexts and lses of this device's queries."""
  query, *travellers = tokens

  def attending(case):
    def add(found, *arguments):
      new = parts.part(case, parameters, constants, *arguments)
      (contexts, lses), (context, lse) = found, new
      context, lse = merge([contexts, context], [lses[..., 0], lse])
      return [context, lse[..., None]]

    return add

  def visit(found, gathered, met, mine, numbers):
    here = [get(each, mine) for each in found]
    here = parts.add(attending, here, numbers, get(query, mine), *met)
    return [put(*each, mine) for each in zip(found, here)], gathered

  start = _nothing_found(ring, parts, parameters, constants, tokens)
  found, _ = _voyage(ring, visit, start, travellers, [])
  return tuple(found)


def _nothing_found(ring: Ring, parts: Parts, parameters, constants, tokens):
  """Contexts and lses before any keys, varying as what is found will."""
  first = [get(each, {-4: 0, -3: 0}) for each in tokens]
  context, lse = jax.eval_shape(
    lambda *arguments: parts.part(FULL, parameters, constants, *arguments),
    *first,
    ring.own_number(0, 0),
    ring.met_number(0, 0, 0),
  )
  zero = axes.varying_zero((parameters, constants, tokens), lse.dtype)
  shape = (*lse.shape[:-1], ring.own.chunks, ring.own.each, ring.own.size)
  return [
    jnp.full((*shape, context.shape[-1]), zero),
    jnp.full((*shape, 1), zero - jnp.inf),
  ]


def _differentiate(ring: Ring, parts: Parts, arguments, found, cotangents):
  """The cotangents of `arguments`.

  With weights P, d context = sum(P d score value + P d value) - d lse context
  and d lse = sum(P d score): sums over keys, hence over the parts. Of a row
  that is NaN nothing comes back, as in `attend`.
  """
  parameters, constants, query, *travellers = arguments
  rows = _by_row(found, cotangents)

  def differentiating(case):
    def add(totals, rows, tokens, *numbers):
      def met(parameters, *tokens):
        return parts.part(case, parameters, constants, *tokens, *numbers)

      (context, lse), back = jax.vjp(met, parameters, *tokens)
      new = back(_by_part(context, lse, *rows))
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
  """Of each query: its lse, and the cotangents that all parts share in."""
  (contexts, lses), (by_contexts, by_lses) = found, cotangents
  lost = jnp.isnan(contexts).any(-1, keepdims=True)
  by_contexts = jnp.where(lost, 0.0, by_contexts)
  contexts = jnp.where(lost, 0.0, contexts)
  along = jnp.sum(by_contexts * contexts, -1, keepdims=True)
  return lses, by_contexts, jnp.where(jnp.isnan(lses), 0.0, by_lses - along)


def _by_part(context, lse, lses, by_contexts, by_lses):
  """The cotangents of a part's context and lse, from those of the whole."""
  lses, by_lses = lses[..., 0], by_lses[..., 0]
  nothing = jnp.isneginf(lse) | jnp.isnan(lses)
  share = jnp.exp(jnp.where(nothing, -jnp.inf, lse - lses))
  by_context = share[..., None] * by_contexts
  context = jnp.where(jnp.isnan(context), 0.0, context)
  return by_context, jnp.sum(by_context * context, -1) + share * by_lses


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
