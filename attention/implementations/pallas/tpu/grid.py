"""The grid of a kernel for TPUs, and the blocks of arrays at its points."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention.arrays import axes
from attention.implementations.blockwise.tiles import with_length
from attention.implementations.pallas.functions import dtypes_of_kernels
from attention.implementations.pallas.operands import Kind, Operand, split
from attention.implementations.pallas.tpu import tokens, whole
from attention.implementations.pallas.tpu.visit import Visit
from attention.implementations.pallas.visits import Visits, unpacked

_VMEM = 64 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class TileGrid:
  """A grid, and the blocks of arrays at its points."""

  problem: Any  # a `tpu.Problem`
  visits: Visits
  shared: tuple[int, ...]  # leading axes that the visits run over

  @property
  def _own(self) -> list[int]:
    """The leading axes of the grid."""
    return [n for n in range(len(self.problem.leading)) if n not in self.shared]

  @property
  def sizes(self) -> list[int]:
    """The leading axes of the context, of size 1 if visits run over them."""
    sizes = enumerate(self.problem.leading)
    return [1 if n in self.shared else size for n, size in sizes]

  def _place(self, point, tiles, groups=None) -> Visit:
    """The visit at a point of the grid."""
    *own, number = point
    indices: dict[int, Any] = dict(zip(self._own, own))
    group = jnp.int32(0) if groups is None else groups[number]
    for axis in reversed(self.shared):
      size = self.problem.leading[axis]
      indices[axis] = jax.lax.rem(group, jnp.int32(size))
      group = jax.lax.div(group, jnp.int32(size))
    leading = tuple(indices[n] for n in range(len(self.problem.leading)))
    row, column, flags = unpacked(tiles[number])
    return Visit(self.problem, number, leading, row, column, flags, groups)

  def _spec(self, block, index: Callable[[Visit], tuple]) -> pl.BlockSpec:
    count = len(self._own) + 1
    return pl.BlockSpec(
      block, lambda *ids: index(self._place(ids[:count], *ids[count:]))
    )

  def _blocks(self, sizes, core, part, place: Callable[[Visit], tuple]):
    """The shape of an array [sizes..., core...], and its blocks."""
    block = (*[None] * len(sizes), *part)
    return (*sizes, *core), self._spec(
      block, lambda visit: (*_of_sizes(visit.indices, sizes), *place(visit))
    )

  def tokens(self, shape, axis: int):
    """The stored shape and the blocks of tokens [..., n, D]."""
    *sizes, length, features = shape
    order = -1 if tokens.is_transposed(features) else 1
    return self._blocks(
      sizes,
      (length, features)[::order],
      (self.problem.tile[axis], features)[::order],
      lambda visit: ((visit.row, visit.column)[axis], 0)[::order],
    )

  @property
  def statistics(self):
    """The shape and the blocks of an array [..., 1, T]."""
    return self._blocks(self.problem.leading, *self._core(Kind.COLUMN))

  def _core(self, kind: Kind, whole_shape: tuple[int, ...] = ()):
    """The core of an array, its part at a visit, and the place of that."""
    (queries, keys), lengths = self.problem.tile, self.problem.padded_lengths
    zeros = (0,) * len(whole_shape)
    return {
      Kind.COLUMN: ((1, lengths[0]), (1, queries), lambda at: (0, at.row)),
      Kind.ROW: ((1, lengths[1]), (1, keys), lambda at: (0, at.column)),
      Kind.TILE: (lengths, (queries, keys), lambda at: (at.row, at.column)),
    }.get(kind, (whole_shape, whole_shape, lambda _: zeros))

  def gradient(self, operand: Operand):
    """The shape and the blocks of the gradient of an operand."""
    sizes = self.sizes
    if operand.kind in (Kind.SCALAR, Kind.WHOLE):
      kept = whole.kept_axes(operand)
      sizes = [n if axis < kept else 1 for axis, n in enumerate(sizes)]
    core = self._core(operand.kind, whole.stored_shape(operand))
    return self._blocks(sizes, *core)

  def operand(self, operand: Operand, array: jax.Array):
    """An operand as the kernel reads it, and its blocks."""
    array = _readable(array)
    if operand.kind is Kind.SCALAR:
      return array.reshape(-1), pl.BlockSpec(memory_space=pltpu.SMEM)
    core, part, place = self._core(operand.kind, whole.stored_shape(operand))
    if operand.kind is Kind.WHOLE:
      array = whole.stored(array, operand)
    elif operand.kind is Kind.TILE:
      array = with_length(with_length(array, core[0]), core[1], axis=-1)
    else:
      array = with_length(array, core[1], axis=-1)[..., None, :]

    def index(visit):
      indices = visit.indices
      leading = (0 if n is None else indices[n] for n in operand.axes)
      return (*leading, *place(visit))

    return array, self._spec((*[None] * len(operand.axes), *part), index)

  def call(
    self, kernel, inputs, outputs, dtypes, scratch, *, kept_axes=None
  ) -> list[jax.Array]:
    """Runs kernel(visit, inputs, outputs, scratch) at all points.

    `scratch` has shapes of vector memory, or other memory. Some outputs are
    sums over the leading axes after the first `kept_axes`.
    """
    problem = self.problem
    kept = len(problem.leading) if kept_axes is None else kept_axes
    sizes = [problem.leading[n] for n in self._own]
    shapes, specs = zip(*outputs)
    given, input_specs = zip(*inputs)
    arrays = axes.varying_alike(given)
    count = len(sizes) + 1
    visits = self.visits.packed()

    def body(*refs):
      point = [pl.program_id(n) for n in range(count)]
      order, *others = split(refs, [len(visits), len(arrays), len(shapes)])
      kernel(self._place(point, *order), *others)

    call = pl.pallas_call(
      body,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(visits),
        grid=(*sizes, len(self.visits.rows)),
        in_specs=input_specs,
        out_specs=list(specs),
        scratch_shapes=[
          pltpu.VMEM(each, problem.dtype) if isinstance(each, tuple) else each
          for each in scratch
        ],
      ),
      out_shape=[
        axes.shape_like(arrays[0], shape, dtype)
        for shape, dtype in zip(shapes, dtypes)
      ],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=[
          pltpu.PARALLEL if n < min(kept, len(sizes)) else pltpu.ARBITRARY
          for n in range(count)
        ],
        vmem_limit_bytes=_VMEM,
      ),
      interpret=problem.interpret,
    )
    prefetched = [in_hbm(problem, each) for each in visits]
    with dtypes_of_kernels(problem.interpret):
      return call(*prefetched, *arrays)


def inputs_of(grid, operands, sources, rows: dict[str, jax.Array]):
  """Tokens, operands and numbers or tokens of rows, with their blocks."""
  problem, inputs = grid.problem, []
  for array, axis in zip(sources, (0, 1, 1)):
    inputs.append((tokens.stored(array), grid.tokens(array.shape, axis)[1]))
  inputs += map(grid.operand, problem.functions.operands, operands)
  inputs = [(in_hbm(problem, array), spec) for array, spec in inputs]
  for name, each in rows.items():
    if each.ndim == len(problem.leading) + 2:
      array, (_, spec) = tokens.stored(each), grid.tokens(each.shape, 0)
    else:
      array, (_, spec) = each[..., None, :], grid.statistics
    if name == "cotangent":
      array = in_hbm(problem, array)
    inputs.append((array, spec))
  return inputs


def in_hbm(problem, array) -> jax.Array:
  """The array; XLA does not copy it to on-chip memory before a kernel."""
  # The blocks that a kernel reads are copied while it computes others.
  return array if problem.interpret else _in_hbm(jnp.asarray(array))


# JAX 0.10.2 has no rule of its own for `jax.vmap`.
@custom_vmap
def _in_hbm(array: jax.Array) -> jax.Array:
  return pltpu.with_memory_space_constraint(array, pltpu.HBM)


@_in_hbm.def_vmap
def _(size: int, is_batched: Sequence[bool], array: jax.Array):
  del size
  return _in_hbm(array), is_batched[0]


def _of_sizes(indices, sizes):
  return tuple(0 if size == 1 else n for n, size in zip(indices, sizes))


def _readable(array: jax.Array) -> jax.Array:
  """Booleans and float16 as numbers that TPUs have."""
  if array.dtype == jnp.bool_:
    return array.astype(jnp.int32)
  return array.astype(jnp.float32) if array.dtype == jnp.float16 else array
