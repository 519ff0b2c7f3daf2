"""The arrays that the kernels for Hopper GPUs read."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays.axes import round_up
from attention.implementations.blockwise.tiles import with_length
from attention.implementations.pallas.hopper.scores.function_sum import (
  FunctionSum,
)
from attention.implementations.pallas.hopper.terms.by_sinusoids import (
  OF_KEYS,
  OF_QUERIES,
)
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  Axes,
  Input,
)
from attention.implementations.pallas.hopper.traced.pairs import number_dtype
from attention.implementations.pallas.operands import Kind, Operand

# A warpgroup copies multiples of so many float32 numbers.
_COPIED = 32


def of_kernel(
  problem: Any,
  own: str,
  operands: Sequence[jax.Array],
  tokens: Sequence[jax.Array],
  rows: Mapping[str, jax.Array],
) -> dict[str, Input]:
  """What a kernel of own queries or keys reads."""
  inputs = _tokens(problem, *tokens)
  own_map = problem.term.maps.get(own)
  if own_map is not None and not own_map.is_scaling:
    # A kernel maps own tokens to another tile.
    inputs["unmapped"] = inputs.pop(own)
  inputs |= _operands(problem, operands, own)
  for name, each in rows.items():
    axes = Axes.ROWS
    if each.ndim > len(problem.leading) + 1:
      # With shards of keys, the context and its cotangent are float32.
      axes, each = Axes.TOKENS, each.astype(tokens[-1].dtype)
    inputs[name] = Input(each, axes, of_keys=False)
  return inputs


def token_axes(problem: Any, query, key) -> Axes:
  """How kernels read mapped queries and keys."""
  if problem.channels is None or problem.term.is_projection:
    return Axes.TOKENS
  is_staged = (
    isinstance(problem.channels, FunctionSum)
    and query.dtype == key.dtype
    and query.dtype.itemsize == 2
    and query.shape[-1] % SIDE == 0
  )
  # A channel of a tile is contiguous; XLA's products write mapped tokens so.
  return Axes.STAGED if is_staged else Axes.CHANNELS


def _tokens(problem: Any, query, key, value) -> dict[str, Input]:
  """Tokens as kernels visit them."""
  axes = token_axes(problem, query, key)
  if axes is Axes.CHANNELS:
    query, key = (
      jnp.moveaxis(each, -1, 0).astype(jnp.float32) for each in (query, key)
    )
  elif axes is Axes.TOKENS:
    query, key = query.astype(value.dtype), key.astype(value.dtype)
  return {
    "query": Input(query, axes, of_keys=False),
    "key": Input(key, axes, of_keys=True),
    "value": Input(value, Axes.TOKENS, of_keys=True),
  }


def _operands(problem: Any, operands, own: str) -> dict[str, Input]:
  """The operands that a kernel reads."""
  terms = problem.terms if own == "key" else []
  unread = {name for each in terms for name in each.unread_by_keys}
  return {
    name: _sinusoids(problem, name, array)
    if name in (OF_QUERIES, OF_KEYS)
    else _operand(problem, operand, _by_distance(problem, name, array), own)
    for (name, operand), array in zip(problem.operands.items(), operands)
    if name not in unread
  }


def _by_distance(problem: Any, name: str, array: jax.Array) -> jax.Array:
  """An array, with numbers of distances in place of those of buckets."""
  if name not in problem.buckets:
    return array
  return jnp.take(array, problem.buckets[name], axis=-1)


def _sinusoids(problem: Any, name: str, array: jax.Array) -> Input:
  """Sinusoids of positions, which a block loads with tokens."""
  ones = [1] * len(problem.leading)
  array = array.reshape(*ones, *array.shape)
  return Input(array, Axes.TOKENS, of_keys=name == OF_KEYS)


def _operand(
  problem: Any, operand: Operand, array: jax.Array, own: str
) -> Input:
  """An array with all leading axes, of size 1 if entries share it."""
  sizes = [1] * len(problem.leading)
  for axis, size in zip(operand.axes, array.shape):
    if axis is not None:
      sizes[axis] = size
  if operand.kind is Kind.TILE:
    return _pairs(problem, array.reshape(*sizes, *operand.core), own)
  if len(operand.core) == 2:
    array = array.reshape(*sizes, *operand.core)
    rows = round_up(operand.core[0], SIDE)
    return Input(with_length(array, rows, "constant"), Axes.MATRIX)
  array = array.astype(number_dtype(array)).reshape(*sizes, -1)
  if operand.kind is Kind.WHOLE:
    size = round_up(array.shape[-1], _COPIED)
    return Input(with_length(array, size, "constant", axis=-1), Axes.WHOLE)
  if operand.kind is Kind.SCALAR:
    return Input(array, Axes.NUMBERS)
  of_keys = operand.kind is Kind.ROW
  array = with_length(array, problem.padded_lengths[of_keys], axis=-1)
  return Input(array, Axes.ROWS, of_keys)


def _pairs(problem: Any, array: jax.Array, own: str) -> Input:
  """An array [..., T, S], up to whole tiles; its own dtype saves memory."""
  if array.dtype.itemsize > 4:
    array = array.astype(number_dtype(array))
  for axis, length in zip((-2, -1), problem.padded_lengths):
    array = with_length(array, length, "constant", axis)
  # A tile is loaded with the tokens that a block visits.
  return Input(array, Axes.PAIRS, of_keys=own == "query")
