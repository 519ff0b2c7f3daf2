"""The shared memory of a block of the kernels for Hopper GPUs."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention import axes
from attention.implementations.pallas.hopper.terms import (
  by_distance,
  by_sinusoids,
)
from attention.implementations.pallas.hopper.terms.prediction_arrays import (
  MATRIX,
  SHARES,
  matrix_tile,
)
from attention.implementations.pallas.hopper.tiles import kept_tiles
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  TILE,
  Axes,
  Input,
  Output,
  parts_of_copy,
  swizzled,
  tile_memory,
)

# The results that are sums over channels, or made of them.
_SUMS = "tokens", "weight"
# Bytes of a multiprocessor for one block, without its barriers and what Mosaic
# needs for reductions.
_LARGEST = 225 * 1024
_ALIGNED = 1024  # bytes of the start of each array


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a block holds in shared memory."""

  # The order is that in memory, on which the compiler's use of registers
  # depends.

  tiles: Mapping[str, Any]
  results: Mapping[str, Any]
  factors: Sequence[Any]  # tiles of numbers of pairs, as factors of products
  products: Any  # a tile of scores before wrappers change them, for gradients
  scores: Any  # a tile of scores, for gradients of normalizers
  dropout_factors: Any  # a tile of factors of weights, for gradients of keys
  barriers: Sequence[Any]
  staging: Any  # a tile of staged tokens before its transposition
  scratch: Any  # of a sum over channels
  of_mapped: Any  # a tile of the gradients of mapped own tokens
  distances: Mapping[str, Any]  # see `by_distance.memory`
  rotation: Mapping[str, Any]  # see `by_sinusoids.memory`
  of_bias: Any  # gradients of values per relative distance, of own queries
  channel_sums: Mapping[str, Any]  # gradients of channels, [A, 64]
  flags: Any  # of own tokens that had NaN or infinity, in a second attempt
  own_numbers: Mapping[str, Any]  # of own queries, which the block computes
  of_shares: Any  # the gradients of predicted shares
  zero: Any  # an index, which the compiler does not know

  def at(self, index: Any) -> "Memory":
    """The tiles of tensor cores, [1, n, m], as [n, m]."""

    def of_ref(ref):
      return ref.at[index] if len(ref.shape) == 3 else ref

    def is_ref(each):
      return hasattr(each, "shape")

    return Memory(**jax.tree.map(of_ref, vars(self), is_leaf=is_ref))


def of_block(
  problem: Any,
  inputs: Mapping[str, Input],
  outputs: Mapping[str, Output],
  over: Mapping[str, str],
  *,
  are_keys_own: bool,
  of_gradients: bool,
) -> Memory:
  """The memory of a block, without results that are written over tiles."""
  loaded = {name: each for name, each in inputs.items() if each.axes.is_tile}
  tiles = {
    name: tile_memory(each.array, each.axes) for name, each in loaded.items()
  }
  own = "key" if are_keys_own else "query"
  of_maps, of_mapped = _of_maps(problem, inputs, tiles, own)
  tiles |= of_maps
  dtype = inputs["value"].array.dtype
  own_numbers = {} if are_keys_own else _own_numbers(problem)
  if SHARES in own_numbers and matrix_tile(problem) not in tiles:
    features = inputs[MATRIX].array.shape[-2]
    tiles[matrix_tile(problem)] = swizzled((features, SIDE), dtype)
  has_products = of_gradients and problem.changed is not None
  has_scores = of_gradients and problem.keeps_scores
  keeps_factors = are_keys_own and problem.dropout is not None
  numbers = plgpu.SMEM((SIDE,), jnp.float32)
  results = {
    name: tile_memory(each.shape, each.axes)
    for name, each in outputs.items()
    if not each.axes.is_direct and name not in over
  }
  free = results | _shared(over, tiles)
  of_distances = functools.partial(
    by_distance.memory,
    *(problem.distances, tiles, free, own),
    of_gradients=of_gradients,
  )
  memory = Memory(
    tiles,
    results,
    factors=_factors(inputs, are_keys_own, of_gradients),
    products=kept_tiles.memory() if has_products else None,
    scores=kept_tiles.memory() if has_scores else None,
    dropout_factors=kept_tiles.memory() if keeps_factors else None,
    barriers=_barriers(loaded.values(), are_keys_own=are_keys_own),
    staging=_staging(inputs.get("query")),
    scratch=() if problem.channels is None else problem.channels.scratch(),
    of_mapped=of_mapped if of_gradients else None,
    distances=of_distances(),
    rotation=by_sinusoids.memory(problem.sinusoids, tiles, free, own),
    of_bias=problem.of_bias.memory()
    if problem.of_bias is not None and problem.of_bias.name in outputs
    else None,
    channel_sums=_channel_sums(problem, outputs),
    flags=numbers if of_gradients else None,
    own_numbers=own_numbers,
    of_shares=numbers if of_gradients and SHARES in own_numbers else None,
    zero=plgpu.SMEM((1,), jnp.int32),
  )
  if not fits(memory):  # without the tile a block computes these factors twice
    memory = dataclasses.replace(memory, dropout_factors=None)
  if not fits(memory):
    memory = dataclasses.replace(memory, distances=of_distances(is_scarce=True))
  return memory


def _barriers(loaded: Iterable[Input], *, are_keys_own: bool) -> list[Any]:
  """Those of the copies of other tokens, and of own and shared arrays."""
  copies = [
    len(parts_of_copy(each.array, each.axes)) * [each.of_keys]
    for each in loaded
  ]
  of_keys = [*itertools.chain(*copies)]
  others = sum(each is (not are_keys_own) for each in of_keys)
  counts = others, len(of_keys) - others
  return [plgpu.Barrier(num_arrivals=count) for count in counts]


def _factors(
  inputs: Mapping[str, Input], are_keys_own: bool, of_gradients: bool
) -> list[Any]:
  """Tiles of gradients of scores, and of weights, as factors of products."""
  value = inputs["value"].array
  of_weights = swizzled(TILE, value.dtype, like=value.shape[-1])
  if not of_gradients:
    return [of_weights]
  other = inputs["query" if are_keys_own else "key"]
  # Only tiles of tokens are multiplied.
  features = other.array.shape[-1] if other.axes is Axes.TOKENS else SIDE
  of_scores = swizzled(TILE, value.dtype, like=features)
  return [of_scores, of_weights] if are_keys_own else [of_scores]


def fits(memory: Memory) -> bool:
  """Whether a multiprocessor has the memory of a block."""

  def size(ref):
    number = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize
    return axes.round_up(number, _ALIGNED)

  refs = jax.tree.leaves(vars(memory), is_leaf=lambda x: hasattr(x, "shape"))
  return sum(size(each) for each in refs if hasattr(each, "dtype")) < _LARGEST


def _of_maps(
  problem: Any, inputs: Mapping[str, Input], tiles: Mapping[str, Any], own: str
) -> tuple[dict[str, Any], Any]:
  """The tiles of maps of own tokens, and that of the results' gradients."""
  own_map = problem.maps.get(own)
  if own_map is not None and own_map.is_scaling:
    features = inputs[own].array.shape[-1]
    return {}, swizzled((SIDE, features), jnp.float32)
  if own_map is not None:
    tokens, dtype = tiles["unmapped"], inputs["unmapped"].array.dtype
    matrices = {
      name: swizzled(inputs[name].array.shape[-2:], dtype)
      for name in own_map.matrices
    }
    return {own: tokens, "remainder": tokens, **matrices}, tokens
  if problem.projections is None:
    return {}, None
  arrays = [inputs[name].array for name in ("query", "key")]
  channels, dtype = problem.channels.channels, arrays[0].dtype
  features = max(each.shape[-1] for each in arrays)
  projection = swizzled((features, channels), dtype)
  return {"projection": projection}, swizzled((SIDE, channels), dtype)


def _own_numbers(problem: Any) -> dict[str, Any]:
  """The numbers of own queries, by the names of inputs that have them."""
  names = []
  if "query" in problem.maps and problem.maps["query"].is_scaling:
    names.append("query scale")
  if problem.prediction is not None:
    names.append(SHARES)
  return {name: plgpu.SMEM((SIDE,), jnp.float32) for name in names}


def _channel_sums(
  problem: Any, outputs: Mapping[str, Output]
) -> dict[str, Any]:
  """The gradients of projected channels."""
  if problem.projections is None:
    return {}
  of_channels = plgpu.SMEM((problem.channels.channels, SIDE), jnp.float32)
  return {name: of_channels for name in _SUMS if name in outputs}


def with_shared(
  problem: Any, memory: Memory, over: Mapping[str, str], own: str
) -> Memory:
  """The memory with the results that are written over tiles."""
  sums, results = memory.channel_sums, memory.results
  if problem.channels is not None and problem.projections is None:
    sums = {name: results[name] for name in _SUMS if name in results}
  free = {**results, **_shared(over, memory.tiles)}
  distances = by_distance.with_shared(
    problem.distances, memory.distances, memory.tiles, free
  )
  rotation = by_sinusoids.with_shared(
    problem.sinusoids, memory.rotation, memory.tiles, free, own
  )
  return dataclasses.replace(
    memory,
    channel_sums=sums,
    distances=distances,
    rotation=rotation,
    results=free,
  )


def _shared(
  over: Mapping[str, str], tiles: Mapping[str, Any]
) -> dict[str, Any]:
  """The results that are written over tiles."""
  return {name: tiles[tile] for name, tile in over.items()}


def written_over(
  problem: Any,
  inputs: Mapping[str, Input],
  outputs: Mapping[str, Output],
  *,
  are_keys_own: bool,
) -> dict[str, str]:
  """The result that is written over a tile that no longer is read, by name."""
  own = "key" if are_keys_own else "query"
  if problem.projections is not None:
    tiles, source = {"context": own, "tokens": own}, own
  elif "unmapped" in inputs:
    tiles = {"context": "unmapped", "tokens": "remainder"}
    source = "unmapped"
  elif "context" in inputs and not are_keys_own:
    tiles, source = {"tokens": "context"}, "context"
  else:
    return {}
  tokens = inputs[source].array
  return {
    name: tile
    for name, tile in tiles.items()
    if name in outputs
    and outputs[name].axes is Axes.TOKENS
    and outputs[name].shape.dtype == tokens.dtype
    and outputs[name].shape.shape[-1] == tokens.shape[-1]
  }


def _staging(queries: Input | None) -> Any:
  """Shared memory for a tile of staged tokens, if there are any."""
  if queries is None or queries.axes is not Axes.STAGED:
    return None
  return tile_memory(queries.array, Axes.TOKENS)
