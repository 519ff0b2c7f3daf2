"""Values per relative distance of the pairs of a tile, in shared memory.

They are a tile [n, LINE]: for each of n places a line, with a number for each
of 64 tokens. The pair in row r and column c has the place start + sign (c - r)
and the token r, or c. JAX has no such operation in kernels for GPUs, so that
`plgpu.inline_mgpu` inlines it.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  TILE,
  WGMMA,
)

# With four more numbers in a line, the pairs of a warp are in different banks.
LINE = SIDE + 4
_BYTES = 4

_SCALAR = plgpu.Layout.WG_SPLAT
_RESULT = plgpu.ShapeDtypeStruct(TILE, jnp.float32, layout=WGMMA)


@dataclasses.dataclass(frozen=True)
class Places:
  """The places of the pairs of a tile, from `start` on."""

  size: int
  sign: int
  of_rows: bool  # whether a number belongs to the token of a row
  start: Any

  def of_pairs(self) -> jax.Array:
    """The places of all pairs, also those outside of the numbers."""
    row, column = (
      jax.lax.broadcasted_iota(jnp.int32, TILE, axis) for axis in (0, 1)
    )
    return self.sign * (column - row) + self.start

  def tokens(self) -> jax.Array:
    """The tokens of all pairs to which numbers belong."""
    return jax.lax.broadcasted_iota(jnp.int32, TILE, int(not self.of_rows))


def entries(device: Device, tile: Any, places: Places) -> jax.Array:
  """The numbers of all pairs; outside of the places, that of the nearer end."""
  if device.interpret:
    place = jnp.clip(places.of_pairs(), 0, places.size - 1)
    return tile[...][place, places.tokens()]

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=_RESULT)
  def load(context, tile, start):
    del context
    pointer, float32 = mgpu.utils.memref_ptr(tile), ir.F32Type.get()
    pairs = _Pairs(places, start)

    def of_pair(number, indices):
      del number
      place, line = pairs.next(indices, _address(pointer))
      # Addresses are clipped, not places, which saves the product for each.
      address = arith.addi(line.first, place.times(LINE * _BYTES))
      address = arith.maxsi(address, line.first)
      last = arith.addi(line.first, _int((places.size - 1) * LINE * _BYTES))
      address = arith.addi(arith.minsi(address, last), _int(line.offset))
      return llvm.load(float32, llvm.inttoptr(pointer.type, address))

    zeros = mgpu.FragmentedArray.splat(
      mgpu.utils.c(0.0, float32), TILE, WGMMA.to_mgpu()
    )
    return zeros.foreach(of_pair, create_array=True)

  return load(tile, places.start)


def put(device: Device, tile: Any, numbers: jax.Array, places: Places) -> None:
  """Writes the numbers of the pairs whose places are between the ends."""
  if device.interpret:
    _put_interpreted(tile, numbers, places)
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, _SCALAR))
  def store(context, tile, numbers, start):
    del context
    pointer = _address(mgpu.utils.memref_ptr(tile))
    pairs = _Pairs(places, start)

    def of_pair(number, indices):
      place, line = pairs.next(indices, pointer)
      address = arith.addi(line.first, place.times(LINE * _BYTES))
      # One comparison of natural numbers for both ends.
      code = (
        "{ .reg .pred %inside; setp.lt.u32 %inside, $2, $3; "
        f"@%inside st.shared.f32 [$0+{line.offset}], $1; }}"
      )
      between = arith.subi(place.value, _int(1))
      last = _int(max(places.size - 2, 0))
      llvm.inline_asm(
        llvm.StructType.get_literal([]),
        [address, number, between, last],
        code,
        "r,f,r,r,~{memory}",
        has_side_effects=True,
      )

    numbers.foreach(of_pair)

  store(tile, numbers, places.start)


def at_end(
  device: Device, numbers: jax.Array, places: Places, *, is_last: bool
) -> jax.Array:
  """The numbers of pairs at one end of the places or beyond, 0 for others."""
  last = places.size - 1
  if device.interpret:
    place = places.of_pairs()
    return jnp.where(place >= last if is_last else place <= 0, numbers, 0.0)

  @plgpu.inline_mgpu(arg_types=(WGMMA, _SCALAR), return_type=_RESULT)
  def select(context, numbers, start):
    del context
    pairs, zero = _Pairs(places, start), mgpu.utils.c(0.0, ir.F32Type.get())
    kind = arith.CmpIPredicate.sge if is_last else arith.CmpIPredicate.sle

    def of_pair(number, indices):
      place, _ = pairs.next(indices, _int(0))
      is_there = arith.cmpi(kind, place.value, _int(last if is_last else 0))
      return arith.select(is_there, number, zero)

    return numbers.foreach(of_pair, create_array=True)

  return select(numbers, places.start)


def positions(device: Device, axis: int, start: Any) -> jax.Array:
  """The positions of the rows or columns of a tile, [64, 64]."""
  if device.interpret:
    return jax.lax.broadcasted_iota(jnp.int32, TILE, axis) + start
  result = plgpu.ShapeDtypeStruct(TILE, jnp.int32, layout=WGMMA)

  @plgpu.inline_mgpu(arg_types=(_SCALAR,), return_type=result)
  def count(context, start):
    del context
    offsets, first = _offsets(), None

    def of_pair(number, indices):
      nonlocal first
      del number
      if first is None:
        own = arith.index_cast(_int_type(), indices[axis])
        first = arith.addi(own, start.registers.flat[0])
      return arith.addi(first, _int(next(offsets)[axis]))

    zeros = mgpu.FragmentedArray.splat(
      _int(0), TILE, WGMMA.to_mgpu(), is_signed=True
    )
    return zeros.foreach(of_pair, create_array=True, is_signed=True)

  return count(jnp.asarray(start, jnp.int32))


def _put_interpreted(tile: Any, numbers: jax.Array, places: Places) -> None:
  place = places.of_pairs()
  is_inside = (place > 0) & (place < places.size - 1)
  place = jnp.where(is_inside, place, tile.shape[0])
  before = jnp.asarray(tile[...])
  # No other pair has the same place and token.
  tile[...] = before.at[place, places.tokens()].set(numbers, mode="drop")


class _Pairs:
  """The places and lines of a thread's pairs, one after the other."""

  # A thread's rows and columns are those of its first pair plus constants,
  # which instructions contain.

  def __init__(self, places: Places, start: Any):
    self._places = places
    (self._start,) = start.registers.flat
    self._first: Any = None
    self._offsets = _offsets()

  def next(self, indices: Sequence[Any], pointer: Any) -> tuple:
    """The place of a pair, and the address of its token in the first line."""
    if self._first is None:
      row, column = (arith.index_cast(_int_type(), each) for each in indices)
      token = row if self._places.of_rows else column
      distance = _signed(self._places.sign, row, column, arith.subi)
      self._first = (
        arith.addi(distance, self._start),
        arith.addi(pointer, arith.muli(token, _int(_BYTES))),
      )
    rows, columns = next(self._offsets)
    distance = _signed(self._places.sign, rows, columns, operator.sub)
    tokens = rows if self._places.of_rows else columns
    place, line = self._first
    return _Shifted(place, distance), _Shifted(line, tokens * _BYTES)


class _Shifted(NamedTuple):
  """A number of a thread's first pair, and the distance from it."""

  first: Any
  offset: int

  @property
  def value(self) -> Any:
    """The number."""
    return arith.addi(self.first, _int(self.offset))

  def times(self, factor: int) -> Any:
    """The product with a number."""
    product = arith.muli(self.first, _int(factor))
    return arith.addi(product, _int(self.offset * factor))


def _signed(sign: int, row: Any, column: Any, subtract: Callable) -> Any:
  return subtract(*((column, row) if sign > 0 else (row, column)))


def _offsets() -> Iterator[tuple[int, int]]:
  """The rows and columns of a thread's pairs, relative to its first."""
  # In the order of `FragmentedArray.foreach`: pairs of columns, then two rows.
  for column, row, next_column in itertools.product(range(8), (0, 8), (0, 1)):
    yield row, 8 * column + next_column


def _address(pointer: Any) -> Any:
  return llvm.ptrtoint(_int_type(), pointer)


def _int_type() -> Any:
  return ir.IntegerType.get_signless(32)


def _int(number: int) -> Any:
  return mgpu.utils.c(number, _int_type())
