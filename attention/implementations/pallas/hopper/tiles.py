"""Blocks of the kernels for Hopper GPUs: what they load, visit and store.

A block has 64 *own* tokens, the rows of its tiles, and visits the *other*
tokens 64 at a time. Own tokens are queries, or keys in the kernel of their
gradients.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

SIDE = 64
TILE = (SIDE, SIDE)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED


class Axes(enum.Enum):
  """The axes of an array beside the leading ones: which are of tokens."""

  TOKENS = (True, False)  # [..., T, D]
  CHANNELS = (False, True)  # [A, ..., T], as XLA writes mapped tokens
  STAGED = (True, False, "transposed")  # [..., T, D], a tile is [D, 64]
  MAPPED = (True, False, "mapped")  # [..., T, D], a result of mapped own tokens
  ROWS = (True,)  # [..., T]
  WHOLE = ()  # the same array for all leading entries
  MATRIX = (False, False)  # [..., D, A], which blocks read and write by parts
  NUMBERS = None  # [..., n], of which a block reads or writes single numbers

  @property
  def is_tile(self) -> bool:
    """Whether a block copies a tile of the array to or from shared memory."""
    return self not in (Axes.MATRIX, Axes.NUMBERS)


class Input(NamedTuple):
  """An array that a kernel reads, of queries, of keys, or of neither."""

  array: Any
  axes: Axes
  of_keys: bool | None = None


class Output(NamedTuple):
  """An array that a kernel writes for its own tokens."""

  shape: jax.ShapeDtypeStruct
  axes: Axes


@dataclasses.dataclass(frozen=True)
class Memory:
  """What a block holds in shared memory."""

  # The order is that in memory, on which the compiler's use of registers
  # depends.

  tiles: Mapping[str, Any]
  results: Mapping[str, Any]
  factors: Sequence[Any]  # tiles of numbers of pairs, as factors of products
  products: Any  # a tile of scores before wrappers change them, for gradients
  barriers: Sequence[Any]
  staging: Any  # a tile of staged tokens before its transposition
  scratch: Any  # of a sum over channels
  map_factor: Any  # a tile that the map of own tokens multiplies
  of_mapped: Any  # a tile of the gradients of mapped own tokens
  marks: Any  # of own tokens that had NaN or infinity, in a second attempt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(Memory):
  """A block of the grid, with the tiles that it holds in shared memory."""

  problem: Any
  are_keys_own: bool
  bounds: Any  # for each row of tiles, its first visit and their end
  inputs: Mapping[str, Input]  # with references to the device's memory
  direct: Mapping[str, Any]  # references to results without a tile of their own
  row: jax.Array  # of tiles
  entry: jax.Array  # of the leading axes

  def load(self, of_own: bool, start: Any) -> None:
    """Copies tiles of own or other tokens to shared memory, and waits."""
    staged = None
    for name, (ref, axes, of_keys) in self.inputs.items():
      is_own = of_keys is None or of_keys == self.are_keys_own
      if axes.is_tile and is_own == of_own:
        source, target = self.place(ref, axes, start), self.tiles[name]
        if axes is Axes.STAGED:  # queries or keys: one array of a load
          staged, target = target, self.staging
        plgpu.copy_gmem_to_smem(source, target, self.barriers[of_own])
    plgpu.barrier_wait(self.barriers[of_own])
    if staged is not None:
      self._transpose(staged)

  @property
  def own_and_other(self) -> tuple[Any, Any]:
    """The tiles of own tokens and of those that are visited."""
    return self.tokens(True), self.tokens(False)

  def tokens(self, of_own: bool) -> Any:
    """The tile of own tokens, or of those that are visited."""
    return self.tiles["key" if of_own == self.are_keys_own else "query"]

  @property
  def own_map(self) -> Any:
    """The map of own tokens that the kernel computes, or None."""
    return self.problem.maps.get("key" if self.are_keys_own else "query")

  def _transpose(self, tile: Any) -> None:
    """Writes the staged tokens as [D, 64]."""
    tokens = self.staging[...].astype(jnp.float32)
    tokens = self.problem.cast(tokens, WGMMA)
    if self.problem.is_masked and "context" in self.results:
      # A function of the user may make a number of a feature that is NaN.
      is_bad = jnp.where(jnp.abs(tokens) < np.inf, 0.0, 1.0)
      is_bad = across(jnp.max(is_bad, axis=1) > 0.0, tokens.shape)
      tokens = jnp.where(is_bad, jnp.nan, tokens)
    if self.problem.interpret:  # the interpreter transposes no references
      tile[...] = tokens.T
    else:
      tokens = plgpu.layout_cast(tokens, _TRANSPOSED)
      plgpu.transpose_ref(tile, (1, 0))[...] = tokens

  def staged(self, result: Any) -> Any:
    """A result [D, 64] as tokens [64, D] in shared memory."""
    if self.problem.interpret:
      tokens = result[...].T
    else:
      ref = plgpu.transpose_ref(result, (1, 0))
      # `optimized` would refuse conflicts of banks.
      tokens = plgpu.load(ref, (), layout=_TRANSPOSED, optimized=False)
    tokens = self.problem.cast(tokens, WGMMA)
    self.staging[...] = tokens.astype(self.staging.dtype)
    return self.staging

  def visits(self, body: Callable, state: Any) -> Any:
    """The state after body(starts, state) of all visible tiles."""

    def visit(column, state):
      self.load(False, column * SIDE)
      return body((self.row * SIDE, column * SIDE), state)

    first, end = (self.bounds[2 * self.row + n] for n in range(2))
    return jax.lax.fori_loop(first, end, visit, state)

  def place(self, ref: Any, axes: Axes, start: Any) -> Any:
    """The tokens from `start` on, of this entry of the leading axes."""
    if axes is Axes.WHOLE:
      return ref
    tokens, sizes = pl.ds(start, SIDE), ref.shape
    if axes is Axes.CHANNELS:
      return ref.at[(slice(None), *self.leading(sizes[1:-1]), tokens)]
    core = [tokens if each else slice(None) for each in axes.value[:2]]
    return ref.at[(*self.leading(sizes[: -len(core)]), *core)]

  def leading(self, sizes: Sequence[int]) -> tuple[Any, ...]:
    """The indices along the leading axes; 0 where an array has size 1."""
    entry, indices = self.entry, []
    for size, own in zip(reversed(self.problem.leading), reversed(sizes)):
      index = jax.lax.rem(entry, jnp.int32(size))
      entry = jax.lax.div(entry, jnp.int32(size))
      indices.append(0 if own == 1 else index)
    return tuple(reversed(indices))

  def number(self, name: str, place: Any) -> jax.Array:
    """A number of this entry of the leading axes."""
    ref = self.inputs[name].array
    return ref[(*self.leading(ref.shape[:-1]), place)]

  def numbers(self, name: str) -> jax.Array:
    """The numbers of rows or columns, or one number, spread over a tile."""
    _, axes, of_keys = self.inputs[name]
    if axes is Axes.NUMBERS:
      return self.number(name, 0)
    tile = self.tiles[name][...]
    if of_keys == self.are_keys_own:
      return across(self.problem.cast(tile, BY_ROW), TILE)
    return down(self.problem.cast(tile, BY_COLUMN), TILE)


def _write(
  block: Block, results: Mapping[str, Any], outputs: Mapping[str, Output]
) -> None:
  """Copies the results of a block to the device's memory."""
  written = {
    name: block.staged(tile) if outputs[name].axes is Axes.STAGED else tile
    for name, tile in block.results.items()
  }
  for name, ref in results.items():
    if outputs[name].axes is Axes.NUMBERS:  # a sum over own tokens
      parts = block.problem.cast(written.pop(name)[...], BY_ROW)
      place = (*block.leading(ref.shape[:-1]), block.row)
      ref[place] = jnp.sum(parts, axis=0)
  plgpu.commit_smem()
  for name in written:
    ref = results[name]
    place = block.place(ref, outputs[name].axes, block.row * SIDE)
    plgpu.copy_smem_to_gmem(written[name], place)
  plgpu.wait_smem_to_gmem(0)


def launch(
  problem: Any,
  compute: Callable[[Block], None],
  visible: np.ndarray,
  inputs: Mapping[str, Input],
  outputs: Mapping[str, Output],
  *,
  are_keys_own: bool = False,
  of_gradients: bool = False,
  finish: Callable[[Block, Any], None] | None = None,
) -> dict[str, jax.Array]:
  """Runs a kernel: compute(block) for each row of tiles and leading entry.

  Results with the axes `MATRIX` are sums over rows of tiles, [..., n, D, A].
  Each of n blocks computes several rows, and adds to its part after each one,
  by finish(block, is_first).
  """
  blocks = _num_blocks(len(visible), outputs)

  def run(bounds, *refs):
    references = {
      name: each._replace(array=ref)
      for (name, each), ref in zip(inputs.items(), refs)
    }
    written = dict(zip(outputs, refs[len(inputs) :]))
    direct = {
      name: written.pop(name)
      for name, each in outputs.items()
      if each.axes in (Axes.MATRIX, Axes.MAPPED)
    }

    def compute_row(number, memory):
      block = Block(
        problem=problem,
        are_keys_own=are_keys_own,
        bounds=bounds,
        inputs=references,
        direct=direct,
        row=jax.lax.axis_index("row") + number * blocks,
        entry=jax.lax.axis_index("leading"),
        **memory,
      )
      block.load(True, block.row * SIDE)
      compute(block)
      _write(block, written, outputs)
      if finish is not None:
        finish(block, number == 0)

    results = {
      name: _tile(ref, outputs[name].axes) for name, ref in written.items()
    }
    memory = _memory(problem, are_keys_own, of_gradients, references, results)

    def scoped(*parts):
      held = dict(zip(vars(memory), parts))

      def compute_next(number, state):
        compute_row(number, held)
        plgpu.commit_smem()  # the next row overwrites the tiles
        return state

      if blocks == len(visible):
        compute_row(0, held)
      else:
        rows = pl.cdiv(len(visible) - jax.lax.axis_index("row"), blocks)
        jax.lax.fori_loop(0, rows, compute_next, None)

    pl.run_scoped(scoped, *vars(memory).values())

  kernel = plgpu.kernel(
    run,
    out_type=tuple(each.shape for each in outputs.values()),
    grid=(blocks, math.prod(problem.leading)),
    grid_names=("row", "leading"),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=problem.interpret or None,
  )
  bounds = jnp.asarray(_bounds(visible != 0).ravel())
  arrays = [each.array for each in inputs.values()]
  return dict(zip(outputs, kernel(bounds, *arrays)))


def _memory(
  problem: Any,
  are_keys_own: bool,
  of_gradients: bool,
  inputs: Mapping[str, Input],
  results: Mapping[str, Any],
) -> Memory:
  """The shared memory of a block."""
  loaded = {name: each for name, each in inputs.items() if each.axes.is_tile}
  others = sum(each.of_keys is (not are_keys_own) for each in loaded.values())
  factor = swizzled(TILE, inputs["value"].array.dtype)
  has_products = of_gradients and problem.changed is not None
  tiles = {name: _tile(each.array, each.axes) for name, each in loaded.items()}
  own, map_factor, of_mapped = "key" if are_keys_own else "query", None, None
  if own in problem.maps:
    tiles[own], tokens = tiles["unmapped"], inputs["unmapped"].array
    matrices = problem.maps[own].matrices
    map_factor = tiles[own] if matrices else None
    if of_gradients:
      dtype = tokens.dtype if matrices else jnp.float32
      of_mapped = swizzled((SIDE, tokens.shape[-1]), dtype)
    for name in matrices:
      tiles[name] = swizzled(inputs[name].array.shape[-2:], tokens.dtype)
  return Memory(
    tiles,
    results,
    factors=[factor] * (2 if of_gradients else 1),
    products=swizzled(TILE, jnp.float32) if has_products else None,
    barriers=[
      plgpu.Barrier(num_arrivals=others),
      plgpu.Barrier(num_arrivals=len(loaded) - others),
    ],
    staging=_staging(inputs.get("query")),
    scratch=() if problem.channels is None else problem.channels.scratch(),
    map_factor=map_factor,
    of_mapped=of_mapped,
    marks=plgpu.SMEM((SIDE,), jnp.float32) if of_gradients else None,
  )


def _num_blocks(rows: int, outputs: Mapping[str, Output]) -> int:
  """The blocks of an entry of the leading axes, of so many rows of tiles."""
  parts = [
    each.shape.shape[-3]
    for each in outputs.values()
    if each.axes is Axes.MATRIX
  ]
  return min([rows, *parts])


def _bounds(visible: np.ndarray) -> np.ndarray:
  """The first visited column of tiles and the end, of each row of tiles."""
  first = np.argmax(visible, axis=1)
  last = visible.shape[1] - np.argmax(visible[:, ::-1], axis=1)
  end = np.where(visible.any(axis=1), last, first)
  return np.stack([first, end], axis=1).astype(np.int32)


def _tile(ref: Any, axes: Axes) -> Any:
  """Shared memory for a tile of an array."""
  shapes = {
    Axes.TOKENS: (SIDE, ref.shape[-1]),
    Axes.CHANNELS: (ref.shape[0], SIDE),
    Axes.STAGED: (ref.shape[-1], SIDE),
    Axes.ROWS: (SIDE,),
    Axes.NUMBERS: (SIDE,),
    Axes.WHOLE: ref.shape,
  }
  dtype = jnp.float32 if axes is Axes.STAGED else ref.dtype
  is_factor = axes is Axes.TOKENS and dtype.itemsize == 2
  return (swizzled if is_factor else plgpu.SMEM)(shapes[axes], dtype)


def swizzled(shape: tuple[int, int], dtype: Any) -> Any:
  """Shared memory that is read in the layout of registers, `WGMMA`."""
  # Rows of 128 bytes, in the order that tensor cores read.
  tiling = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize))
  transforms = tiling, plgpu.SwizzleTransform(128)
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def _staging(queries: Input | None) -> Any:
  """Shared memory for a tile of staged tokens, if there are any."""
  if queries is None or queries.axes is not Axes.STAGED:
    return None
  return _tile(queries.array, Axes.TOKENS)


def across(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[n] to [n, m]."""
  return jax.lax.broadcast_in_dim(column, shape, (0,))


def down(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[m] to [n, m]."""
  return jax.lax.broadcast_in_dim(row, shape, (1,))
