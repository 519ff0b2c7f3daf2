"""Running sums of rows on TPUs, which add rolled rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention import axes

_LANES, _ROWS = 128, 8


def running_sums(
  interpret: Any,
  function: Callable[..., Sequence[jax.Array]],
  *arrays: jax.Array,
  is_reversed: bool,
) -> list[jax.Array]:
  """The running sums of `function(*arrays)` along the last axis.

  The function receives whole rows.
  """
  shape, length = arrays[0].shape, arrays[0].shape[-1]
  count = math.prod(shape[:-1])
  block = (min(count, _ROWS), -(-length // _LANES) * _LANES)
  # The attention kernels read and write rows [1, S]; XLA would copy [..., S].
  layouts = [
    ((count, length), pl.BlockSpec(block, lambda n: (n, 0))),
    (
      (count, 1, length),
      pl.BlockSpec((block[0], 1, block[1]), lambda n: (n, 0, 0)),
    ),
  ]
  (given, input_spec), (own, spec) = layouts[:: -1 if is_reversed else 1]

  def kernel(*refs):
    places = jax.lax.broadcasted_iota(jnp.int32, block, 1)
    inputs = [each[...].reshape(block) for each in refs[: len(arrays)]]
    parts = function(*(jnp.where(places < length, x, 0.0) for x in inputs))
    for part, result in zip(parts, refs[len(arrays) :], strict=True):
      sums = _scanned(part, places, is_reversed)
      result[...] = sums.reshape(result.shape)

  rows = [each.reshape(given) for each in arrays]
  shapes = _results(function, rows, own)
  results = pl.pallas_call(
    kernel,
    grid=(-(-count // block[0]),),
    in_specs=[input_spec] * len(rows),
    out_specs=[spec] * len(shapes),
    out_shape=shapes,
    interpret=interpret,
  )(*rows)
  return [each.reshape(shape) for each in results]


def _scanned(numbers: jax.Array, places: jax.Array, is_reversed: bool):
  """The running sums of rows, by sums of 2, 4, 8, ... numbers."""
  length, shift = numbers.shape[1], 1
  while shift < length:
    moved = pltpu.roll(numbers, length - shift if is_reversed else shift, 1)
    is_inside = places < length - shift if is_reversed else places >= shift
    numbers = numbers + jnp.where(is_inside, moved, 0.0)
    shift *= 2
  return numbers


def _results(function, rows, shape) -> list[jax.ShapeDtypeStruct]:
  """The types of the results for rows of numbers."""
  parts = jax.eval_shape(function, *rows)
  return [axes.shape_like(rows[0], shape, each.dtype) for each in parts]
