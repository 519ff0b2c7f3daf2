"""Attention over a sequence that several devices share.

A device keeps its queries. Keys and values travel around the ring of devices,
so that it sees all of them, one device's share at a time, and the parts are
merged by their lse. Backwards they travel once more and gather their gradients
on the way. What a device holds falls with the number of devices.

Axes: n devices, c chunks a device, t queries and s keys of a chunk.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from attention.pairwise import EMPTY, FULL, PARTIAL
from attention.ring.order import Order, chunk_of, num_chunks
from attention.ring.placed import PlacedBias, PlacedMask
from attention.scores import Score, as_score, scaled_dot_score

_CAPTURED = (
  "A score that is a plain function cannot capture arrays that all devices "
  "have alike; make them arguments, ring_attention(..., score=jax.tree_util."
  "Partial(function, array)), or attributes of an attention.scores.Score."
)


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
  ring = _Ring(axis_name, jax.lax.axis_size(axis_name), order)
  queries, keys, values = map(ring.cut, (query, key, value))
  sizes = queries.shape[-2], keys.shape[-2]
  mask = mask if mask is None else as_mask(mask)
  bias = bias if bias is None else as_bias(bias)
  for pairs in (mask, bias):
    if pairs is not None:
      pairs.check(*(size * ring.num_chunks for size in sizes))
  table = _table(mask, sizes, ring.num_chunks)
  score, mask, bias = ring.varying((as_score(score), mask, bias))

  def part(query, key, value, row, column):
    """The context and lse of a chunk of queries over a chunk of keys."""
    offsets = row * sizes[0], column * sizes[1]

    def attended(mask):
      context, lse = attend(
        query,
        key,
        value,
        score=score,
        mask=mask,
        bias=bias if bias is None else PlacedBias(bias, *offsets),
        implementation=implementation,
        return_lse=True,
      )
      return context.astype(lse.dtype), lse

    def empty():
      shapes = jax.eval_shape(lambda: attended(None))
      return _nothing(shapes, (query, key, value, score, bias))

    cases = {
      EMPTY: empty,
      PARTIAL: lambda: attended(mask and PlacedMask(mask, *offsets)),
      # With a mask, tokens that are not finite stay where they are seen.
      FULL: lambda: attended(mask and Band(None, None)),
    }
    present = np.unique(table)
    branches = [cases[int(case)] for case in present]
    if len(branches) == 1:
      return branches[0]()
    branch = jnp.asarray(np.searchsorted(present, table))[row, column]
    return jax.lax.switch(branch, branches)

  number = jax.lax.axis_index(axis_name)
  example = queries[0], keys[0], values[0], number, number
  part, captured = without_captured(part, *example)
  part, parameters, constants = _apart(part, captured, ring)
  context, lse = _travel(
    ring, part, parameters, constants, queries, keys, values
  )
  context, lse = ring.joined(context, -2), ring.joined(lse, -1)
  context = context.astype(query.dtype)
  return (context, lse) if return_lse else context


@dataclasses.dataclass(frozen=True)
class _Ring:
  """The devices of an axis, and what each of them has of a sequence."""

  axis_name: str
  size: int
  order: Order

  @property
  def chunks(self) -> int:
    """C."""
    return num_chunks(self.order)

  @property
  def num_chunks(self) -> int:
    """N c, of the whole sequence."""
    return self.chunks * self.size

  @property
  def meetings(self) -> jax.Array:
    """[c c, 2]: each of a device's chunks with each of another's."""
    pairs = np.indices((self.chunks,) * 2, dtype=np.int32)
    return jnp.asarray(pairs.reshape(2, -1).T)

  @property
  def steps(self) -> jax.Array:
    """[n]: after so many steps a share comes from that far back."""
    return jnp.arange(self.size, dtype=jnp.int32)

  def cut(self, tokens):
    """[c, ..., t, D], of this device's share [..., c t, D]."""
    length = tokens.shape[-2]
    if length % self.chunks:
      raise ValueError(
        f"order={self.order!r} needs a share of tokens that {self.chunks}"
        f" divides, got {length}"
      )
    return jnp.stack(jnp.split(tokens, self.chunks, axis=-2))

  def joined(self, chunks, axis):
    """The opposite of `cut`."""
    return jnp.concatenate(list(chunks), axis=axis)

  def varying(self, tree):
    """Told to differ between devices, so that their gradients are summed."""
    device = jax.lax.axis_index(self.axis_name)

    def vary(leaf):
      if not isinstance(leaf, jax.Array):
        return leaf
      return jnp.where(device < 0, jnp.zeros_like(leaf), leaf)

    return jax.tree.map(vary, tree)

  def passed_on(self, tree):
    """What the device before this one has."""
    to_next = [(i, (i + 1) % self.size) for i in range(self.size)]
    return jax.tree.map(
      lambda array: jax.lax.ppermute(array, self.axis_name, to_next), tree
    )

  def numbers(self, step, meeting):
    """Where the two chunks stand in the whole sequence."""
    device = jax.lax.axis_index(self.axis_name)
    owners = device, (device - step) % self.size
    return [
      chunk_of(owner, place, self.size, self.order)
      for owner, place in zip(owners, meeting)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _travel(
  ring: _Ring, part: Callable, parameters, constants, queries, keys, values
):
  """Contexts [c, ..., t, E] and lses [c, ..., t] of this device's queries."""
  meet = functools.partial(part, parameters, constants)
  shapes = jax.eval_shape(
    meet, queries[0], keys[0], values[0], *ring.numbers(0, (0, 0))
  )
  nothing = _nothing(shapes, (parameters, constants, queries, keys, values))

  def turn(carry, step):
    found, (keys, values) = carry

    def add(found, meeting):
      row, column = meeting
      old = [array[row] for array in found]
      new = meet(
        queries[row], keys[column], values[column], *ring.numbers(step, meeting)
      )
      merged = merge(*zip(old, new))
      found = [array.at[row].set(each) for array, each in zip(found, merged)]
      return found, None

    found, _ = jax.lax.scan(add, found, ring.meetings)
    return (found, ring.passed_on((keys, values))), None

  start = [jnp.stack([array] * ring.chunks) for array in nothing]
  (found, _), _ = jax.lax.scan(turn, (start, (keys, values)), ring.steps)
  return tuple(found)


def _travel_forward(ring, part, *arguments):
  found = _travel(ring, part, *arguments)
  return found, (arguments, found)


def _travel_backward(ring, part, kept, cotangents):
  # With weights P: d context = sum(P d score value + P d value) - d lse context
  # and d lse = sum(P d score). These are sums over keys, hence over parts.
  (parameters, constants, queries, keys, values), (contexts, lses) = kept
  by_contexts, by_lses = cotangents
  # Of a row that is NaN nothing comes back, as in `attend`.
  lost = jnp.isnan(lses)
  contexts, by_contexts = (
    jnp.where(lost[..., None], 0.0, each) for each in (contexts, by_contexts)
  )
  by_lses = jnp.where(lost, 0.0, by_lses - jnp.sum(by_contexts * contexts, -1))

  def turn(carry, step):
    by_parameters, by_queries, (keys, values, by_keys, by_values) = carry

    def add(totals, meeting):
      by_parameters, by_queries, by_keys, by_values = totals
      row, column = meeting

      def met(parameters, query, key, value):
        numbers = ring.numbers(step, meeting)
        return part(parameters, constants, query, key, value, *numbers)

      (context, lse), back = jax.vjp(
        met, parameters, queries[row], keys[column], values[column]
      )
      # The share of the softmax that falls to these keys.
      nothing = jnp.isneginf(lse) | lost[row]
      share = jnp.exp(jnp.where(nothing, -jnp.inf, lse - lses[row]))
      by_context = share[..., None] * by_contexts[row]
      seen = jnp.where(nothing[..., None], 0.0, context)
      by_lse = jnp.sum(by_context * seen, -1) + share * by_lses[row]
      new_parameters, by_query, by_key, by_value = back((by_context, by_lse))
      return (
        jax.tree.map(_plus, by_parameters, new_parameters),
        by_queries.at[row].set(_plus(by_queries[row], by_query)),
        by_keys.at[column].set(_plus(by_keys[column], by_key)),
        by_values.at[column].set(_plus(by_values[column], by_value)),
      ), None

    (by_parameters, by_queries, *gathered), _ = jax.lax.scan(
      add, (by_parameters, by_queries, by_keys, by_values), ring.meetings
    )
    travellers = ring.passed_on((keys, values, *gathered))
    return (by_parameters, by_queries, travellers), None

  differentiated = parameters, queries, keys, values
  by_parameters, by_queries, by_keys, by_values = jax.tree.map(
    _wide_zeros, differentiated
  )
  start = by_parameters, by_queries, (keys, values, by_keys, by_values)
  (by_parameters, by_queries, (_, _, by_keys, by_values)), _ = jax.lax.scan(
    turn, start, ring.steps
  )
  gradients = by_parameters, by_queries, by_keys, by_values
  by_parameters, *by_tokens = jax.tree.map(
    lambda total, array: total.astype(array.dtype), gradients, differentiated
  )
  return by_parameters, None, *by_tokens


_travel.defvjp(_travel_forward, _travel_backward)


def _wide_zeros(array):
  """Zeros to add gradients to, float32 at least."""
  dtype = jnp.promote_types(array.dtype, jnp.float32)
  return jnp.zeros_like(array, dtype)


def _plus(total, array):
  return total + array.astype(total.dtype)


def _nothing(shapes, arguments):
  """The context and lse of no keys, differing between the same devices."""
  context, lse = (
    jnp.full(each.shape, axes.varying_zero(arguments, each.dtype))
    for each in shapes
  )
  return context, lse - jnp.inf


def _table(mask: Mask | None, sizes: tuple[int, int], chunks: int):
  """EMPTY, PARTIAL or FULL for each pair of chunks of the whole sequence."""
  if mask is None:
    return np.full((chunks, chunks), FULL, np.int8)
  return visibility(mask, *(Ranges.cut(size * chunks, size) for size in sizes))


def _apart(part: Callable, captured: Sequence[Any], ring: _Ring):
  """A part of (parameters, constants, ...), the ones with gradients, the rest.

  Raises:
    ValueError: if gradients of a parameter would have to be summed over the
      devices while these do different things.
  """
  has_gradient = [
    isinstance(array, jax.core.Tracer)
    and jnp.issubdtype(jnp.result_type(array), jnp.inexact)
    for array in captured
  ]
  for array, needed in zip(captured, has_gradient):
    if needed and jax.typeof(array) != jax.typeof(ring.varying(array)):
      raise ValueError(_CAPTURED)

  def apart(parameters, constants, *arguments):
    sources = {True: iter(parameters), False: iter(constants)}
    return part([next(sources[kind]) for kind in has_gradient], *arguments)

  parameters, constants = (
    [array for array, has in zip(captured, has_gradient) if has is kind]
    for kind in (True, False)
  )
  return apart, parameters, constants
