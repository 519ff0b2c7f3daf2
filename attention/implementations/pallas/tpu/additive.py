"""The additive score of a tile on a TPU: a loop over channels in registers.

A step of the loop over rows computes 8 queries with all keys of the tile. The
sum over channels stays in registers, and no array has all pairs and channels.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention.implementations.pallas.tpu.tokens import LANES

_ROWS = 8  # of a register


@jax.custom_vjp
def weighted_tanh_sum(query, key, weight):
  """sum_a weight[a] tanh(query[t, a] + key[s, a]), [t, s]."""
  # `query` [t, A], `key` [s, A] and `weight` [A]; t is a multiple of 8.
  shape = (query.shape[0], key.shape[0])

  def run(arrays, scores_ref):
    def rows(number, _):
      at = _rows_of(number)

      def add(hidden, weight, channel, total):
        del channel
        return total + weight * hidden

      zero = jnp.zeros((_ROWS, shape[1]), query.dtype)
      scores_ref[at, :] = arrays.over_channels(at, add, zero)

    jax.lax.fori_loop(0, shape[0] // _ROWS, rows, None)
    return scores_ref[...]

  return _with_arrays(run, query, key, weight, [shape])


def _forward(query, key, weight):
  arguments = query, key, weight
  values = [each.value for each in arguments]
  wanted = [each.perturbed for each in arguments]
  return weighted_tanh_sum(*values), (values, wanted)


def _backward(residuals, cotangent):
  """The gradients of the arguments that are differentiated, zeros of others."""
  (query, key, weight), wanted = residuals
  size = query.shape[-1]
  # For each channel one register of partial sums per 128 keys.
  shapes = [query.shape, (_ROWS * size, key.shape[0]), (_ROWS * size, LANES)]
  chosen = [shape for shape, is_wanted in zip(shapes, wanted) if is_wanted]

  def run(arrays, cotangent_ref, *refs):
    given = iter(refs)
    sums = [next(given) if is_wanted else None for is_wanted in wanted]
    cotangent_ref[...] = cotangent
    for each in sums[1:]:
      if each is not None:
        each[...] = jnp.zeros_like(each)

    def rows(number, _):
      at = _rows_of(number)
      of_query = _rows_of_gradients(arrays, at, cotangent_ref[at, :], sums)
      if sums[0] is not None:
        sums[0][at, :] = of_query

    jax.lax.fori_loop(0, query.shape[0] // _ROWS, rows, None)
    finish = (
      lambda each: each * weight[None],
      lambda each: _by_channel(each).T * weight[None],
      lambda each: jnp.sum(_by_channel(each).T, axis=0),
    )
    return [
      jnp.zeros_like(argument) if each is None else function(each[...])
      for argument, each, function in zip((query, key, weight), sums, finish)
    ]

  scratch = [cotangent.shape, *chosen]
  return tuple(_with_arrays(run, query, key, weight, scratch))


weighted_tanh_sum.defvjp(_forward, _backward, symbolic_zeros=True)


def _rows_of_gradients(arrays, at, cotangent, sums):
  """Adds to the sums of 8 queries; returns their gradient."""
  size = arrays.query.shape[-1]
  lanes = jax.lax.broadcasted_iota(jnp.int32, (_ROWS, size), 1)

  def add(hidden, weight, channel, of_query):
    del weight
    slope = cotangent * (1.0 - hidden * hidden)
    place = pl.ds(pl.multiple_of(channel * _ROWS, _ROWS), _ROWS)
    if sums[1] is not None:
      sums[1][place, :] += slope
    if sums[2] is not None:
      sums[2][place, :] += _in_one_register(cotangent * hidden)
    if sums[0] is None:
      return of_query
    total = jnp.sum(slope, axis=-1, keepdims=True)
    return jnp.where(lanes == channel, total, of_query)

  zero = jnp.zeros((_ROWS, size), cotangent.dtype)
  return arrays.over_channels(at, add, zero)


class _Arrays(NamedTuple):
  """The arguments in VMEM."""

  query: Any  # [t, A]
  columns: Any  # [A, s]
  weight: Any  # [1, A]

  def over_channels(self, at: Any, body: Callable, carry: Any) -> Any:
    """body(tanh(query + key), weight, channel, carry) for all channels."""
    size = self.query.shape[-1]

    def channels(start, count, carry):
      query = self.query[at, pl.ds(start, count)]
      weight = self.weight[:, pl.ds(start, count)]
      for lane in range(count):
        one = slice(lane, lane + 1)
        column = self.columns[pl.ds(start + lane, 1), :]
        hidden = jnp.tanh(query[:, one] + column)
        carry = body(hidden, weight[:, one], start + lane, carry)
      return carry

    def many(number, carry):
      return channels(pl.multiple_of(number * LANES, LANES), LANES, carry)

    whole = size // LANES
    if whole > 1:
      carry = jax.lax.fori_loop(0, whole, many, carry)
    elif whole:
      carry = channels(0, LANES, carry)
    rest = size - whole * LANES
    return channels(whole * LANES, rest, carry) if rest else carry


def _with_arrays(
  run: Callable, query, key, weight, shapes: Sequence[tuple[int, ...]]
) -> Any:
  """run(arrays, *references to arrays of these shapes)."""

  def filled(query_ref, columns_ref, weight_ref, *refs):
    query_ref[...] = query
    columns_ref[...] = key.T
    weight_ref[...] = weight[None]
    return run(_Arrays(query_ref, columns_ref, weight_ref), *refs)

  all_shapes = [query.shape, key.shape[::-1], (1, weight.shape[0]), *shapes]
  return pl.run_scoped(
    filled, *(pltpu.VMEM(shape, query.dtype) for shape in all_shapes)
  )


def _rows_of(number):
  return pl.ds(pl.multiple_of(number * _ROWS, _ROWS), _ROWS)


def _in_one_register(array):
  """Sums groups of 128 columns: [8, s] to [8, 128]."""
  parts = [array[:, n : n + LANES] for n in range(0, array.shape[-1], LANES)]
  return sum(parts[1:], parts[0])


def _by_channel(sums):
  """[8 A, n] to [A, n]: sums each channel's register."""
  return jnp.sum(sums.reshape(-1, _ROWS, sums.shape[-1]), axis=1)
