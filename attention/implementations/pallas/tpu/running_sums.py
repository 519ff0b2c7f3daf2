"""Running sums of rows on TPUs, which add rolled rows."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention.arrays import axes
from attention.implementations.pallas.functions import dtypes_of_kernels
from attention.implementations.pallas.tpu.tokens import LANES

_ROWS = 8


def running_sums(
  interpret: Any,
  function: Callable[..., Sequence[jax.Array]],
  *arrays: jax.Array,
  is_reversed: bool,
) -> list[jax.Array]:
  """The running sums of `function(*arrays)` along the last axis.

  The function receives rows. Unless `is_reversed`, there is one array, and its
  second argument is the sum of the row's absolute values.
  """
  shape, length = arrays[0].shape, arrays[0].shape[-1]
  count = math.prod(shape[:-1])
  block = (min(count, _ROWS), axes.round_up(length, LANES))
  # The attention kernels read and write rows [1, S]; XLA would copy [..., S].
  layouts = [
    ((count, length), pl.BlockSpec(block, lambda n: (n, 0))),
    (
      (count, 1, length),
      pl.BlockSpec((block[0], 1, block[1]), lambda n: (n, 0, 0)),
    ),
  ]
  (stored, input_spec), (own, spec) = layouts[:: -1 if is_reversed else 1]

  def kernel(*refs):
    places = jax.lax.broadcasted_iota(jnp.int32, block, 1)
    inputs = [each[...].reshape(block) for each in refs[: len(arrays)]]
    given = [jnp.where(places < length, each, 0.0) for each in inputs]
    if not is_reversed:
      given.append(jnp.sum(jnp.abs(given[0]), axis=-1, keepdims=True))
    parts = function(*given)
    for part, result in zip(parts, refs[len(arrays) :], strict=True):
      sums = _scanned(part, places, is_reversed)
      result[...] = sums.reshape(result.shape)

  rows = [each.reshape(stored) for each in arrays]
  bounds = [] if is_reversed else [jnp.ones((), rows[0].dtype)]
  parts = jax.eval_shape(function, *rows, *bounds)
  shapes = [axes.shape_like(rows[0], own, each.dtype) for each in parts]
  call = pl.pallas_call(
    kernel,
    grid=(-(-count // block[0]),),
    in_specs=[input_spec] * len(rows),
    out_specs=[spec] * len(shapes),
    out_shape=shapes,
    interpret=interpret,
  )
  with dtypes_of_kernels(interpret):
    results = call(*rows)
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
