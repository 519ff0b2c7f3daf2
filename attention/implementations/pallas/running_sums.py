"""Running sums of numbers by position, in one kernel.

XLA computes the sums of the log gates of `forgetting` in 10 operations on a
TPU. Here they and their transposes are one each. A TPU adds rolled rows; on a
GPU it is the scan of Triton, as Mosaic GPU has none.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton

from attention import axes
from attention.custom_transpose import with_kernel_as_transpose
from attention.scores import decay

# Longer rows, with what is computed from them, do not fit on the chip.
_LONGEST = 1 << 15
_LANES, _ROWS = 128, 8


def make_running_sums(target: str, interpret: Any) -> decay.RunningSums:
  """`decay.running_sums` by kernels for a target, "tpu" or "hopper"."""
  kernel = _on_tpu if target == "tpu" else _on_gpu
  sums = functools.partial(kernel, interpret)

  def of_last(residuals, cotangents):
    del residuals
    given = [each for each in cotangents if each is not None]
    return sums(lambda *numbers: (sum(numbers),), *given, is_reversed=True)

  @jax.custom_jvp
  def running_sums(numbers):
    total, rest = sums(decay.exact_parts, numbers, is_reversed=False)
    return total, total, rest

  @running_sums.defjvp
  def rule(primals, tangents):
    moved = with_kernel_as_transpose(_twice, of_last, [], [*tangents])
    return running_sums(*primals), (*moved, jnp.zeros_like(moved[0]))

  def running_sums_of(numbers):
    if numbers.shape[-1] > _LONGEST or 0 in numbers.shape:
      return decay.running_sums(numbers)
    return running_sums(numbers)

  return running_sums_of


def _twice(residuals, arguments):
  """The running sums of one array, in XLA, for queries and for keys."""
  del residuals
  return [jnp.cumsum(arguments[0], axis=-1)] * 2


def _on_tpu(
  interpret: Any, function, *arrays: jax.Array, is_reversed: bool
) -> list[jax.Array]:
  """The running sums of `function(*arrays)` along the last axis."""
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


def _on_gpu(
  interpret: Any, function, *arrays: jax.Array, is_reversed: bool
) -> list[jax.Array]:
  """The running sums of `function(*arrays)` along the last axis."""
  shape, length = arrays[0].shape, arrays[0].shape[-1]
  size = pl.next_power_of_2(length)  # as arrays of Triton have
  rows = [each.reshape(-1, length) for each in arrays]
  rows = [jnp.pad(each, ((0, 0), (0, size - length))) for each in rows]

  def kernel(*refs):
    places = jnp.arange(size)
    places = size - 1 - places if is_reversed else places
    inputs, results = refs[: len(rows)], refs[len(rows) :]
    given = [each[places] for each in inputs]
    for part, result in zip(function(*given), results, strict=True):
      result[places] = jnp.cumsum(part, axis=-1)

  spec = pl.BlockSpec((None, size), lambda n: (n, 0))
  shapes = _results(function, rows, rows[0].shape)
  results = pl.pallas_call(
    kernel,
    grid=(len(rows[0]),),
    in_specs=[spec] * len(rows),
    out_specs=[spec] * len(shapes),
    out_shape=shapes,
    compiler_params=triton.CompilerParams(
      num_warps=min(max(size // 512, 1), 32)
    ),
    interpret=bool(interpret),
  )(*rows)
  return [each[:, :length].reshape(shape) for each in results]


def _results(function, rows, shape) -> list[jax.ShapeDtypeStruct]:
  """The types of the results for rows of numbers."""
  parts = jax.eval_shape(function, *rows)
  return [axes.shape_like(rows[0], shape, each.dtype) for each in parts]
