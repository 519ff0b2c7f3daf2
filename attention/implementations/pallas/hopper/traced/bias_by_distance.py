"""Biases per relative distance, such as T5's, in the kernels for Hopper GPUs.

Pairs look up their numbers in shared memory. The kernel of queries keeps the
gradients of each number and query, and sums them at the end.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import Primitive
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from attention.arrays import axes
from attention.biases import types as biases
from attention.implementations.pallas.hopper.tiles import matrices, parts
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  SIDE,
  TILE,
  WGMMA,
)
from attention.implementations.pallas.hopper.tiles.look_up import LINE, Places
from attention.implementations.pallas.hopper.tiles.parts import Slice
from attention.implementations.pallas.operands import Kind
from attention.implementations.pallas.pair_tile import Tile
from attention.positional.base import GroupHeads

# The numbers whose gradients fit into a block's shared memory.
_MOST = 272
_LINES = 8

# Numbers [n] at places [64, 64], as an operation of a traced bias. With
# `buckets`, the bucket of each place, the numbers are those of buckets.
number_at_p = Primitive("number_at")


@number_at_p.def_abstract_eval
def _(numbers, places, buckets):
  del buckets
  return places.update(dtype=numbers.dtype)


class PairTile(Tile):
  """A tile whose positions are those of all pairs."""

  def by_distance(self, numbers, max_distance, buckets):
    """See `Tile`."""
    places = self.keys - self.queries + max_distance
    if buckets is not None:
      buckets = tuple(buckets.tolist())
    return number_at_p.bind(numbers, places, buckets=buckets)


@dataclasses.dataclass(frozen=True)
class Numbers:
  """Numbers in shared memory."""

  interpret: Any
  tile: Any

  def at(self, places: jax.Array, size: int) -> jax.Array:
    """Those at places, of so many; outside, the first or the last."""
    if self.interpret:
      return self.tile[...][jnp.clip(places, 0, size - 1)]

    @plgpu.inline_mgpu(
      arg_types=(plgpu.RefType(), WGMMA),
      return_type=plgpu.ShapeDtypeStruct(TILE, jnp.float32, layout=WGMMA),
    )
    def load(context, tile, places):
      del context
      pointer, float32 = mgpu.utils.memref_ptr(tile), ir.F32Type.get()
      first, last = (
        mgpu.utils.c(n, ir.IntegerType.get_signless(32)) for n in (0, size - 1)
      )

      def of_pair(place, indices):
        del indices
        place = arith.minsi(arith.maxsi(place, first), last)
        address = mgpu.utils.getelementptr(pointer, [place], float32)
        return llvm.load(float32, address)

      return places.foreach(of_pair, create_array=True)

    return load(self.tile, places)


def numbers_at(numbers: Any, places: jax.Array, size: int) -> jax.Array:
  """The numbers of pairs; of an array outside of kernels, its shape only."""
  if isinstance(numbers, Numbers):
    return numbers.at(places, size)
  return jnp.zeros(places.shape, numbers.dtype)


@dataclasses.dataclass(frozen=True)
class BiasGradient:
  """The bias whose gradient the kernel of queries computes."""

  name: str  # an input [..., 2m + 1]
  size: int

  def slices(self) -> dict[str, Slice]:
    """What the kernel of queries adds to the gradient of numbers."""
    return {self.name: Slice((axes.round_up(self.size, SIDE),))}

  def memory(self) -> Any:
    """Shared memory for the gradients of numbers and queries."""
    lines = axes.round_up(self.size, _LINES)
    return plgpu.SMEM((1, lines, LINE), jnp.float32)

  def places(self, starts: Any) -> Places:
    """The places of the pairs of a tile of own queries."""
    own, other = starts
    start = jnp.clip(other - own + self.size // 2, -SIDE, self.size + SIDE)
    return Places(self.size, 1, of_rows=True, start=start.astype(jnp.int32))


def gradient_of(bias: Any, function: Any) -> BiasGradient | None:
  """The values per relative distance of a bias that kernels differentiate."""
  if function is None:
    return None
  found = [
    (name, each)
    for name, each in zip(function.names, function.operands)
    if each.kind is Kind.WHOLE
  ]
  terms = [*_terms(bias)]
  types = biases.ByDistance | biases.ByBucket
  own = [each for each in terms if isinstance(each, types)]
  if len(found) != 1 or len(own) != 1:
    return None
  if found[0][1].origin is not own[0].numbers:
    return None
  size = 2 * own[0].max_distance + 1
  return BiasGradient(found[0][0], size) if size <= _MOST else None


def _terms(bias: Any):
  if isinstance(bias, biases.Sum):
    yield from _terms(bias.left)
    yield from _terms(bias.right)
  elif isinstance(bias, biases.BiasView) and isinstance(
    bias.transform, GroupHeads
  ):
    yield from _terms(bias.inner)
  else:
    yield bias


def add_sums(block: Any) -> None:
  """Adds the gradient of numbers to the block's parts."""
  lines = block.of_bias
  if lines is None:
    return
  part = parts.own_part(block, block.problem.of_bias.name)
  for first in range(0, lines.shape[0], SIDE):
    count = min(SIDE, lines.shape[0] - first)
    chunk = lines.at[pl.ds(first, count), pl.ds(0, SIDE)]
    total = jnp.sum(block.problem.read_transposed(chunk), axis=0)
    own = part.at[pl.ds(first, count)]
    matrices.add(block.problem, own, total, block.is_first, BY_COLUMN)
