"""A block of the gradient kernels for Hopper GPUs: 64 queries, or 64 keys.

Both kernels compute scores and weights again, from the statistics of the rows.
The kernel of queries computes the gradients of queries, of numbers, of arrays
of pairs and of an additive score's weight, the kernel of keys those of keys and
values. Where own tokens were mapped or projected, both transpose the map at the
end, and add to the gradients of its matrices and vectors.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.attempts import (
  attempts,
  not_finite,
  when,
)
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.block.gradient_rows import (
  write_gradient_rows,
)
from attention.implementations.pallas.hopper.kernels import array_of_pairs
from attention.implementations.pallas.hopper.kernels.gradient_visit import (
  clean,
  visit_tile,
)
from attention.implementations.pallas.hopper.scores import (
  distances,
  own_tokens,
  predictions,
  projections,
  rotations,
)
from attention.implementations.pallas.hopper.scores.channels import (
  for_each_channel,
)
from attention.implementations.pallas.hopper.terms.prediction_arrays import (
  SHARES,
)
from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import BY_ROW, across
from attention.implementations.pallas.hopper.traced.bias_by_distance import (
  add_sums,
)


def gradients(block: Block, wanted: Sequence[str] = ()) -> None:
  """Computes the gradients of own tokens, from all visible tiles.

  Those of the numbers that are `wanted` are summed over a block when written.
  """
  own_tokens.map_own(block)
  predictions.predict_own(block)
  array_of_pairs.clear_hidden(block)
  if not block.are_keys_own:
    write_gradient_rows(block)
  compute = functools.partial(_compute, block, wanted)
  attempts(
    block.problem, compute, always_masked=bool(array_of_pairs.of_block(block))
  )
  block = block.with_new_addresses()
  distances.add_tables(block)
  rotations.add_arrays(block)
  add_sums(block)
  predicted = predictions.pull_back(block)
  if block.problem.term.is_projection:
    projections.pull_back(block, predicted)
  elif block.own_map is not None:
    own_tokens.pull_back(block, predicted)
    own_tokens.add_matrices(block)
  elif predicted is not None:
    result = block.results["tokens"]
    total = block.problem.read(result) + predicted
    result[...] = total.astype(result.dtype)


def _compute(block: Block, wanted: Sequence[str], is_second: Any) -> jax.Array:
  """Writes the gradients; 1 for tokens for which they are not finite."""
  block = block.with_new_addresses()
  problem, results = block.problem, block.results
  of_map = () if block.own_map is None else block.own_map.numbers
  wanted = [name for name in wanted if name not in of_map]
  wanted += [SHARES] if SHARES in block.own_numbers else []
  rows = [block.sums_of_pairs(name) for name in wanted]
  if not block.are_keys_own:
    rows.append(results["mean"])

  @when(is_second)
  def _():
    rotations.load_unmapped(block)
    clean(block, of_own=True)

  of_channels = _start(block, wanted)
  # Tensor cores sum the gradients of dot products and of values.
  scales = {} if problem.channels is not None else {"tokens": problem.factor}
  if block.are_keys_own:
    scales["value"] = 1.0

  def compute(sums):
    def visit(block, starts, state):
      return visit_tile(block, sums, wanted, is_second, starts)

    block.visits(visit, None)
    return _written(block.with_new_addresses(), sums, scales)

  shapes = {name: results[name].shape for name in scales}
  if rotations.has_own_map(block):
    shapes["sinusoids"] = rotations.visited_factor(block).shape
  flags = pl.run_scoped(
    compute,
    {name: plgpu.ACC(shape, jnp.float32) for name, shape in shapes.items()},
  )
  if is_second is not None:
    numbers = [problem.cast(each[...], BY_ROW) for each in rows]
    flags = jnp.maximum(flags, not_finite(problem, numbers))
    if of_channels:
      sums = _sums_of_zeros(problem, of_channels)
      flags = jnp.maximum(flags, not_finite(problem, [sums]))

  @when(is_second)
  def _():
    _clear_flagged(block)

  return flags


def _start(block: Block, wanted: Sequence[str]) -> list[Any]:
  """Prepares own tokens and sets sums to zero; returns those of channels."""
  problem, of_channels = block.problem, []
  distances.prepare_own(block)
  rotations.prepare(block)
  if block.of_bias is not None:
    distances.set_to_zero(block, block.of_bias)
    plgpu.commit_smem()
  if problem.channels is not None:
    of_channels = [*block.channel_sums.values()]
    _set_to_zero(block, of_channels)
    problem.channels.prepare(block, of_own=True)
  for name in wanted:
    block.sums_of_pairs(name)[...] = problem.zeros()
  return of_channels


def _written(block: Block, sums: Any, scales: dict[str, float]) -> jax.Array:
  """Writes sums; 1 for tokens for which they are not finite."""
  if "tokens" in sums:
    distances.add_tokens(block, sums["tokens"])
    rotations.add_tokens(block, sums)
  flags = not_finite(block.problem, [])
  for name, scale in reversed(scales.items()):
    result = block.of_tokens if name == "tokens" else block.results[name]
    total = sums[name][...]
    total = total if scale == 1.0 else total * scale
    flags = jnp.maximum(flags, not_finite(block.problem, [total]))
    block.problem.write(result, total.astype(result.dtype))
  return flags


def _sums_of_zeros(device: Device, results: Sequence[Any]) -> jax.Array:
  """0, or NaN for tokens with gradients of channels that are not finite."""

  def add(channel, sums):
    for each in results:
      sums = sums + 0.0 * device.cast(each[channel], BY_ROW)
    return sums

  zeros = device.zeros()
  return jax.lax.fori_loop(0, results[0].shape[0], add, zeros)


def _clear_flagged(block: Block) -> None:
  """Sets the gradients of tokens that had NaN or infinity to zero."""
  # A function of the user may have infinite derivatives at a token of zeros.
  cast = block.problem.cast
  is_flagged = cast(block.flags[...], BY_ROW) > 0.0
  if block.problem.channels is None:
    result = block.of_tokens
    numbers = block.problem.read(result)
    numbers = jnp.where(across(is_flagged, numbers.shape), 0.0, numbers)
    result[...] = numbers.astype(result.dtype)
    return
  result = block.channel_sums["tokens"]

  def clear(channel, state):
    numbers = cast(result[channel], BY_ROW)
    result[channel] = jnp.where(is_flagged, 0.0, numbers)
    return state

  for_each_channel(block, result.shape[0], clear, None)


def _set_to_zero(block: Block, results: Sequence[Any]) -> None:
  zeros = block.problem.zeros()

  def clear(channel, state):
    for each in results:
      each[channel] = zeros
    return state

  for_each_channel(block, results[0].shape[0], clear, None)
