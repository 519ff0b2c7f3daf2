"""The shared memory of a block of the kernels for Hopper GPUs."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.arrays import axes
from attention.implementations.pallas.hopper.terms.prediction_arrays import (
  MATRIX,
  SHARES,
)
from attention.implementations.pallas.hopper.tiles import kept_tiles
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  TILE,
  Axes,
  Input,
  Kernel,
  parts_of_copy,
  swizzled,
  tile_memory,
)

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
  scratch: Any  # memory that a sum over channels needs
  of_term: Mapping[str, Any]  # see `ScoreTerm.memory`
  tables: Sequence[Any]  # see `ScoreTerm.num_tables`
  of_bias: Any  # gradients of values per relative distance, of own queries
  flags: Any  # 1 for own tokens that had NaN or infinity, in a second attempt
  own_numbers: Mapping[str, Any]  # numbers of own queries that a block computes
  of_shares: Any  # the gradients of predicted shares
  zero: Any  # an index, which the compiler does not know

  def at(self, index: Any) -> "Memory":
    """The tiles of tensor cores, [1, n, m], as [n, m]."""

    def of_ref(ref):
      return ref.at[index] if len(ref.shape) == 3 else ref

    def is_ref(each):
      return hasattr(each, "shape")

    return Memory(**jax.tree.map(of_ref, vars(self), is_leaf=is_ref))


def of_block(problem: Any, kernel: Kernel) -> Memory:
  """The memory of a block, without results that are written over tiles."""
  inputs, own, of_gradients = kernel.inputs, kernel.own, kernel.of_gradients
  loaded = {name: each for name, each in inputs.items() if each.axes.is_tile}
  tiles = {
    name: tile_memory(each.array, each.axes) for name, each in loaded.items()
  }
  tiles |= problem.term.tiles(kernel)
  numbers = plgpu.SMEM((SIDE,), jnp.float32)
  names = problem.own_numbers if own == "query" else []
  own_numbers = dict.fromkeys(names, numbers)
  if SHARES in own_numbers:
    shape = inputs[MATRIX].array.shape[-2], SIDE
    matrix = swizzled(shape, inputs["value"].array.dtype)
    tiles.setdefault(problem.term.matrix_tile, matrix)
  has_products = of_gradients and problem.changed is not None
  has_scores = of_gradients and problem.keeps_scores
  keeps_factors = own == "key" and problem.dropout is not None
  staged = [each for each in loaded.values() if each.axes is Axes.STAGED]
  over = _shared(problem, kernel, tiles)
  results = {
    name: tile_memory(each.shape, each.axes)
    for name, each in kernel.outputs.items()
    if not each.axes.is_direct and name not in over
  }
  unused = _unused(problem, tiles, results | over, own)

  def tables(**options):
    number = problem.term.num_tables(kernel, **options)
    return [tiles["query"]] * (number - len(unused))

  memory = Memory(
    tiles,
    results,
    factors=_factors(kernel),
    products=kept_tiles.memory() if has_products else None,
    scores=kept_tiles.memory() if has_scores else None,
    dropout_factors=kept_tiles.memory() if keeps_factors else None,
    barriers=_barriers(loaded.values(), own),
    staging=tile_memory(staged[0].array, Axes.TOKENS) if staged else None,
    scratch=() if problem.channels is None else problem.channels.scratch(),
    of_term=problem.term.memory(kernel),
    tables=tables(),
    of_bias=problem.of_bias.memory()
    if problem.of_bias is not None and problem.of_bias.name in kernel.outputs
    else None,
    flags=numbers if of_gradients else None,
    own_numbers=own_numbers,
    of_shares=numbers if of_gradients and SHARES in own_numbers else None,
    zero=plgpu.SMEM((1,), jnp.int32),
  )
  if not fits(memory):  # without the tile a block computes these factors twice
    memory = dataclasses.replace(memory, dropout_factors=None)
  if not fits(memory):
    memory = dataclasses.replace(memory, tables=tables(is_scarce=True))
  return memory


def _barriers(loaded: Iterable[Input], own: str) -> list[Any]:
  """Those of the copies of other tokens, and of own and shared arrays."""
  copies = [
    len(parts_of_copy(each.array, each.axes)) * [each.of_keys]
    for each in loaded
  ]
  of_keys = [*itertools.chain(*copies)]
  others = sum(each is (own == "query") for each in of_keys)
  counts = others, len(of_keys) - others
  return [plgpu.Barrier(num_arrivals=count) for count in counts]


def _factors(kernel: Kernel) -> list[Any]:
  """Tiles of gradients of scores, and of weights, as factors of products."""
  value = kernel.inputs["value"].array
  of_weights = swizzled(TILE, value.dtype, like=value.shape[-1])
  if not kernel.of_gradients:
    return [of_weights]
  are_keys_own = kernel.own == "key"
  other = kernel.inputs["query" if are_keys_own else "key"]
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


def with_shared(problem: Any, kernel: Kernel, memory: Memory) -> Memory:
  """The memory with the results and tables that are written over tiles."""
  tiles = memory.tiles
  results = {**memory.results, **_shared(problem, kernel, tiles)}
  tables = [*_unused(problem, tiles, results, kernel.own), *memory.tables]
  return dataclasses.replace(memory, results=results, tables=tables)


def _unused(
  problem: Any, tiles: Mapping[str, Any], results: Mapping[str, Any], own: str
) -> list[Any]:
  """The tiles that have room for a term's tables."""
  tokens = tiles["query"]
  return [
    each
    for each in problem.term.unused(tiles, results, own)
    if each.shape == tokens.shape and each.dtype == tokens.dtype
  ]


def _shared(
  problem: Any, kernel: Kernel, tiles: Mapping[str, Any]
) -> dict[str, Any]:
  """The results that are written over tiles that no longer are read."""
  places, outputs = problem.term.written_over(kernel), kernel.outputs
  if not places:
    return {}
  tokens = kernel.inputs[next(iter(places.values()))].array
  return {
    name: tiles[place]
    for name, place in places.items()
    if name in outputs
    and outputs[name].axes is Axes.TOKENS
    and outputs[name].shape.dtype == tokens.dtype
    and outputs[name].shape.shape[-1] == tokens.shape[-1]
  }
