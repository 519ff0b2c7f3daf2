"""Attention over a sequence that several devices share.

A device keeps its queries. Keys and values travel around the ring of devices,
so that it sees all of them, one device's share at a time, and the parts are
merged by their lse. Backwards they travel once more and gather their gradients
on the way. What a device holds falls with the number of devices.

Axes: n devices, c chunks of the sequence a device, t queries and s keys of a
piece, into which chunks are cut again so that only a little travels at a time.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import axes
from attention.biases.types import as_bias
from attention.captured import without_captured
from attention.checks import check_tokens
from attention.choice import Implementation
from attention.dispatch import attend
from attention.masks.types import Band, Mask, as_mask
from attention.masks.visibility import Ranges, visibility
from attention.merging import merge
from attention.pairwise import EMPTY, FULL
from attention.ring.order import Order, chunk_of, num_chunks
from attention.ring.placed import PlacedBias, PlacedMask
from attention.scores import Score, as_score, scaled_dot_score

_CAPTURED = (
  "A score that is a plain function cannot capture arrays that all devices "
  "have alike; make them arguments, ring_attention(..., score=jax.tree_util."
  "Partial(function, array)), or attributes of an attention.scores.Score."
)
# Tokens of a piece: its scores should be no larger than what a device holds.
_PIECE = 512


def ring_attention(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  axis_name: str,
  score: Score | Callable = scaled_dot_score,
  mask: Any = None,
  bias: Any = None,
  order: Order = "zigzag",
  implementation: Implementation = None,
  return_lse: bool = False,
) -> Any:
  """`attend`, for a sequence whose tokens lie on several devices.

  To be called within `jax.shard_map`, with this device's share of the tokens,
  laid out by `arrange`. See "Ring Attention with Blockwise Transformers for
  Near-Infinite Context", Liu et al., 2023, section 3
  (https://arxiv.org/abs/2310.01889). First derivatives, in reverse mode.

  Args:
    query: [..., T / n, Dq], this device's.
    key: [..., S / n, Dk], this device's; leading axes as in `attend`.
    value: [..., S / n, E], this device's.
    axis_name: of the mesh, over which tokens are divided.
    score: as in `attend`.
    mask: as in `attend`, for all T x S pairs. No scores are computed between
      chunks of which is known, when tracing, that nobody sees anybody. Arrays
      are whole, and in the sequence's own order.
    bias: likewise.
    order: "zigzag", which gives all devices the same work under a causal mask,
      or "contiguous", for the sequence as it is.
    implementation: of the parts, as in `attend`.
    return_lse: as in `attend`.

  Returns:
    The context [..., T / n, E] in the query's dtype; with `return_lse` a pair
    of it and the lse [..., T / n].

  Raises:
    AssertionError: as in `attend`.
    TypeError: as in `attend`.
    ValueError: as in `attend`; or if c does not divide a share of tokens, the
      order is unknown, or a plain function captures parameters.

  Example:
    >>> from attention import masks
    >>> mesh = jax.make_mesh((1,), ("sequence",))
    >>> share = jax.P("sequence")
    >>> def look(tokens):
    ...   return ring_attention(
    ...     tokens, tokens, tokens, axis_name="sequence", mask=masks.causal()
    ...   )
    >>> look = jax.shard_map(look, mesh=mesh, in_specs=share, out_specs=share)
    >>> place = jax.NamedSharding(mesh, share)
    >>> look(jax.device_put(jnp.eye(2), place))
    Array([[1.  , 0.  ],
           [0.33, 0.67]], dtype=float32)
  """
  check_tokens(query=query, key=key, value=value)
  own, met = (
    _Cut.of(name, tokens.shape[-2], order)
    for name, tokens in (("query", query), ("key", key))
  )
  ring = _Ring(axis_name, jax.lax.axis_size(axis_name), order, own, met)
  mask = mask if mask is None else as_mask(mask)
  bias = bias if bias is None else as_bias(bias)
  for pairs in (mask, bias):
    if pairs is not None:
      pairs.check(query.shape[-2] * ring.size, key.shape[-2] * ring.size)
  table = _table(mask, ring)
  score, mask, bias = ring.varying((as_score(score), mask, bias))

  def part(case, query, key, value, row, column):
    """The context and lse of a piece of queries over a piece of keys."""
    place = row * own.size, column * met.size
    visible = mask
    if mask is not None:
      # Where all is seen, a mask still keeps what is not finite in its rows.
      full = case == FULL
      visible = Band(None, None) if full else PlacedMask(mask, *place)
    context, lse = attend(
      query,
      key,
      value,
      score=score,
      mask=visible,
      bias=bias if bias is None else PlacedBias(bias, *place),
      implementation=implementation,
      return_lse=True,
    )
    return context.astype(lse.dtype), lse

  pieces = own.pieces(query), met.pieces(key), met.pieces(value)
  number = jax.lax.axis_index(axis_name)
  example = (*(_get(each, {-4: 0, -3: 0}) for each in pieces), number, number)
  parts = {
    int(case): without_captured(functools.partial(part, int(case)), *example)
    for case in {*np.unique(table), FULL} - {EMPTY}
  }
  captured = {case: arrays for case, (_, arrays) in parts.items()}
  parameters, constants, joined = _apart(captured, ring)
  functions = {case: function for case, (function, _) in parts.items()}

  def meet(case, parameters, constants, *arguments):
    captured = joined(parameters, constants)
    return functions[case](captured[case], *arguments)

  travel = _make_travel(ring, table, meet)
  context, lse = travel(parameters, constants, *pieces)
  context = context.reshape(*context.shape[:-4], -1, context.shape[-1])
  lse = lse.reshape(*lse.shape[:-4], -1)
  context = context.astype(query.dtype)
  return (context, lse) if return_lse else context


@dataclasses.dataclass(frozen=True)
class _Cut:
  """A device's share of tokens: c chunks of `each` pieces of `size` tokens."""

  chunks: int
  each: int
  size: int

  @classmethod
  def of(cls, name: str, length: int, order: Order) -> "_Cut":
    """The longest pieces that divide a chunk and are not too long."""
    chunks = num_chunks(order)
    if length % chunks:
      raise ValueError(
        f"order={order!r} needs a share of {name} tokens that {chunks} divides,"
        f" got {length}"
      )
    chunk = length // chunks
    sizes = (size for size in range(_PIECE, 0, -1) if chunk % size == 0)
    size = min(next(sizes), chunk)
    # Many short ones are worse than a single long one.
    size = chunk if size < min(chunk, _PIECE // 8) else size
    return cls(chunks, chunk // max(size, 1) or 1, size)

  def pieces(self, tokens):
    """[..., c, each, size, D], of [..., L, D]."""
    shape = (self.chunks, self.each, self.size, tokens.shape[-1])
    return tokens.reshape(*tokens.shape[:-2], *shape)


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The devices of an axis, and how each one's queries and keys are cut."""

  axis_name: str
  size: int
  order: Order
  own: _Cut
  met: _Cut

  @property
  def steps(self) -> jax.Array:
    """[n]: after so many steps a share comes from that far back."""
    return jnp.arange(self.size, dtype=jnp.int32)

  @property
  def meetings(self) -> jax.Array:
    """[., 3]: chunk and piece of queries, and the chunk of keys they meet."""
    counts = self.own.chunks, self.own.each, self.met.chunks
    every = np.indices(counts, dtype=np.int32)
    return jnp.asarray(every.reshape(3, -1).T)

  def numbers(self, step, meeting, departure):
    """Where two pieces that meet stand in the whole sequence."""
    device = jax.lax.axis_index(self.axis_name)
    owner = (device - step) % self.size
    mine, piece, other = meeting
    return (
      chunk_of(device, mine, self.size, self.order) * self.own.each + piece,
      chunk_of(owner, other, self.size, self.order) * self.met.each + departure,
    )

  def varying(self, tree):
    """Told to differ between devices, so that their gradients are summed."""
    device = jax.lax.axis_index(self.axis_name)

    def vary(leaf):
      if not _may_have_gradient(leaf):
        return leaf
      return jnp.where(device < 0, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(vary, tree)

  def passed_on(self, tree):
    """What the device before this one has."""
    to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
    return jax.tree.map(
      lambda array: jax.lax.ppermute(array, self.axis_name, to_next), tree
    )


def _make_travel(ring: _Ring, table: np.ndarray, part: Callable) -> Callable:
  """The journey of all keys and values around the ring.

  Args:
    ring: the devices.
    table: EMPTY, PARTIAL or FULL for all pairs of pieces of the sequence.
    part: (case, parameters, constants, query, key, value, row, column) ->
      context and lse of two pieces.

  Returns:
    (parameters, constants, query, key, value) -> contexts [..., c, m, t, E] and
    lses [..., c, m, t, 1].
  """
  cases = [int(case) for case in np.unique(table)]
  branch_of = np.searchsorted(cases, table).astype(np.int32)

  def add_part(make, total, numbers, *arguments):
    """make(case)(total, *arguments, *numbers), of what these pieces are."""

    def branch(case):
      if case == EMPTY:
        return lambda total, *_: total
      return make(case)

    operands = (total, *arguments, *numbers)
    if len(cases) == 1:
      return branch(cases[0])(*operands)
    chosen = jnp.asarray(branch_of)[numbers]
    return jax.lax.switch(chosen, list(map(branch, cases)), *operands)

  @jax.custom_vjp
  def travel(parameters, constants, query, key, value):
    def attending(case):
      def add(found, *arguments):
        context, lse = part(case, parameters, constants, *arguments)
        contexts = found[0], context
        lses = found[1][..., 0], lse
        context, lse = merge(contexts, lses)
        return [context, lse[..., None]]

      return add

    def visit(found, travelling, nothing, mine, other, numbers):
      here = [_get(each, mine) for each in found]
      tokens = _get(query, mine), *(_get(each, other) for each in travelling)
      here = add_part(attending, here, numbers, *tokens)
      return [_put(*each, mine) for each in zip(found, here)], nothing

    tokens = query, key, value
    example = [_get(each, {-4: 0, -3: 0}) for each in tokens]
    context, lse = jax.eval_shape(
      functools.partial(part, FULL, parameters, constants),
      *example,
      *ring.numbers(0, (0, 0, 0), 0),
    )
    zero = axes.varying_zero((parameters, constants, tokens), lse.dtype)
    shape = (*lse.shape[:-1], ring.own.chunks, ring.own.each, ring.own.size)
    found = [
      jnp.full((*shape, context.shape[-1]), zero),
      jnp.full((*shape, 1), zero - jnp.inf),
    ]
    found, _ = _voyage(ring, visit, found, [key, value], [])
    return tuple(found)

  def forward(*arguments):
    found = travel(*arguments)
    return found, (arguments, found)

  def backward(kept, cotangents):
    # With weights P: d context = sum(P d score value + P d value) - d lse
    # context and d lse = sum(P d score). These are sums over keys, hence over
    # parts. Of a row that is NaN nothing comes back, as in `attend`.
    (parameters, constants, *tokens), (contexts, lses) = kept
    lost = jnp.isnan(contexts).any(-1, keepdims=True)
    by_contexts = jnp.where(lost, 0.0, cotangents[0])
    contexts = jnp.where(lost, 0.0, contexts)
    along = jnp.sum(by_contexts * contexts, -1, keepdims=True)
    by_lses = jnp.where(jnp.isnan(lses), 0.0, cotangents[1] - along)
    rows = lses, by_contexts, by_lses

    def differentiating(case):
      def add(totals, rows, tokens, *numbers):
        lses, by_contexts, by_lses = rows

        def met(parameters, *tokens):
          return part(case, parameters, constants, *tokens, *numbers)

        (context, lse), back = jax.vjp(met, parameters, *tokens)
        nothing = jnp.isneginf(lse) | jnp.isnan(lses[..., 0])
        share = jnp.exp(jnp.where(nothing, -jnp.inf, lse - lses[..., 0]))
        by_context = share[..., None] * by_contexts
        context = jnp.where(jnp.isnan(context), 0.0, context)
        by_lse = jnp.sum(by_context * context, -1) + share * by_lses[..., 0]
        return jax.tree.map(_plus, totals, list(back((by_context, by_lse))))

      return add

    def visit(state, travelling, gathered, mine, other, numbers):
      by_parameters, by_query = state
      totals = [
        by_parameters,
        _get(by_query, mine),
        *(_get(each, other) for each in gathered),
      ]
      query = _get(tokens[0], mine)
      met = [query, *(_get(each, other) for each in travelling)]
      here = [_get(each, mine) for each in rows]
      totals = add_part(differentiating, totals, numbers, here, met)
      by_parameters, by_here, *by_met = totals
      gathered = [_put(*each, other) for each in zip(gathered, by_met)]
      return (by_parameters, _put(by_query, by_here, mine)), gathered

    differentiated = parameters, *tokens
    by_parameters, by_query, *arrived = jax.tree.map(
      _wide_zeros, differentiated
    )
    state, arrived = _voyage(
      ring, visit, (by_parameters, by_query), tokens[1:], arrived
    )
    by_parameters, *by_tokens = jax.tree.map(
      lambda total, array: total.astype(array.dtype),
      (*state, *arrived),
      differentiated,
    )
    return by_parameters, None, *by_tokens

  travel.defvjp(forward, backward)
  return travel


def _voyage(ring: _Ring, visit: Callable, state, travellers, arrived):
  """Sends arrays around the ring, and calls `visit` wherever pieces meet.

  Args:
    ring: the devices.
    visit: (state, travelling, gathered, mine, other, numbers) -> state and
      gathered; `mine` and `other` are the places of the two pieces, `numbers`
      tells where they stand in the sequence.
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

      def meet(carry, meeting):
        mine, piece, other = meeting
        numbers = ring.numbers(step, meeting, departure)
        places = {-4: mine, -3: piece}, {-3: other}
        state, gathered = carry
        return visit(state, travelling, gathered, *places, numbers), None

      (state, gathered), _ = jax.lax.scan(
        meet, (state, gathered), ring.meetings
      )
      return (state, following, ring.passed_on(gathered)), None

    travelling, gathered = (
      [_get(each, place) for each in arrays] for arrays in (travellers, arrived)
    )
    (state, _, gathered), _ = jax.lax.scan(
      turn, (state, travelling, gathered), ring.steps
    )
    arrived = [_put(*each, place) for each in zip(arrived, gathered)]
    return (state, arrived), None

  departures = jnp.arange(ring.met.each, dtype=jnp.int32)
  (state, arrived), _ = jax.lax.scan(depart, (state, arrived), departures)
  return state, arrived


def _get(array: jax.Array, places: dict[int, Any]) -> jax.Array:
  """What stands at places of some axes, {-3: 0}; these axes are gone."""
  rank = array.ndim
  sizes = [1 if n - rank in places else array.shape[n] for n in range(rank)]
  block = jax.lax.dynamic_slice(array, _starts(rank, places), sizes)
  return jax.lax.squeeze(block, tuple(places))


def _put(array: jax.Array, new: jax.Array, places: dict[int, Any]) -> jax.Array:
  """The array with something new there."""
  new = jnp.expand_dims(new, tuple(places))
  return jax.lax.dynamic_update_slice(array, new, _starts(array.ndim, places))


def _starts(rank: int, places: dict[int, Any]) -> list[Any]:
  return [jnp.int32(places.get(n - rank, 0)) for n in range(rank)]


def _wide_zeros(array):
  """Zeros to add gradients to, float32 at least."""
  dtype = jnp.promote_types(array.dtype, jnp.float32)
  return jnp.zeros_like(array, dtype)


def _plus(total, array):
  return total + array.astype(total.dtype)


def _table(mask: Mask | None, ring: _Ring) -> np.ndarray:
  """EMPTY, PARTIAL or FULL for each pair of pieces of the whole sequence."""
  cuts = ring.own, ring.met
  counts = [cut.chunks * cut.each * ring.size for cut in cuts]
  if mask is None:
    return np.full(counts, FULL, np.int8)
  return visibility(
    mask,
    *(
      Ranges.cut(cut.size * count, max(cut.size, 1))
      for cut, count in zip(cuts, counts)
    ),
  )


def _may_have_gradient(leaf) -> bool:
  return isinstance(leaf, jax.core.Tracer) and jnp.issubdtype(
    jnp.result_type(leaf), jnp.inexact
  )


def _apart(captured, ring: _Ring):
  """The arrays with a gradient, the others, and how to put them together.

  Raises:
    ValueError: if gradients would have to be summed over the devices while
      these do different things.
  """
  leaves, tree = jax.tree.flatten(captured)
  is_parameter = list(map(_may_have_gradient, leaves))
  for leaf, has in zip(leaves, is_parameter):
    if has and jax.typeof(leaf) != jax.typeof(ring.varying(leaf)):
      raise ValueError(_CAPTURED)

  def joined(parameters, constants):
    sources = {True: iter(parameters), False: iter(constants)}
    return jax.tree.unflatten(
      tree, [next(sources[has]) for has in is_parameter]
    )

  parameters, constants = (
    [leaf for leaf, has in zip(leaves, is_parameter) if has is kind]
    for kind in (True, False)
  )
  return parameters, constants, joined
