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
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


class Axes(enum.Enum):
  """The axes of an array beside the leading ones: which are of tokens."""

  TOKENS = (True, False)  # [..., T, D]
  CHANNELS = (False, True)  # [A, ..., T], as XLA writes mapped tokens
  ROWS = (True,)  # [..., T]
  WHOLE = ()  # the same array for all leading entries
  NUMBERS = None  # [..., n], of which a block reads single numbers


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
class Block:
  """A block of the grid, with the tiles that it holds in shared memory."""

  problem: Any
  are_keys_own: bool
  bounds: Any  # for each row of tiles, its first visit and their end
  inputs: Mapping[str, Input]  # with references to the device's memory
  tiles: Mapping[str, Any]
  results: Mapping[str, Any]
  factors: Sequence[Any]  # tiles of numbers of pairs, as factors of products
  barriers: Sequence[Any]
  row: jax.Array  # of tiles
  entry: jax.Array  # of the leading axes

  def load(self, of_own: bool, start: Any) -> None:
    """Copies tiles of own or other tokens to shared memory, and waits."""
    for name, (ref, axes, of_keys) in self.inputs.items():
      is_own = of_keys is None or of_keys == self.are_keys_own
      if axes is not Axes.NUMBERS and is_own == of_own:
        source = self.place(ref, axes, start)
        barrier = self.barriers[of_own]
        plgpu.copy_gmem_to_smem(source, self.tiles[name], barrier)
    plgpu.barrier_wait(self.barriers[of_own])

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
    core = [tokens if each else slice(None) for each in axes.value]
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


def launch(
  problem: Any,
  compute: Callable[[Block], None],
  visible: np.ndarray,
  inputs: Mapping[str, Input],
  outputs: Mapping[str, Output],
  *,
  are_keys_own: bool = False,
  num_factors: int = 1,
) -> dict[str, jax.Array]:
  """Runs a kernel: one block for each row of tiles and leading entry."""

  def run(bounds, *refs):
    references = {
      name: each._replace(array=ref)
      for (name, each), ref in zip(inputs.items(), refs)
    }
    results = dict(zip(outputs, refs[len(inputs) :]))
    loaded = {
      name: each
      for name, each in references.items()
      if each.axes is not Axes.NUMBERS
    }
    others = sum(each.of_keys is (not are_keys_own) for each in loaded.values())

    def scoped(tiles, result_tiles, factors, barriers):
      block = Block(
        problem,
        are_keys_own,
        bounds,
        references,
        tiles,
        result_tiles,
        factors,
        barriers,
        jax.lax.axis_index("row"),
        jax.lax.axis_index("leading"),
      )
      block.load(True, block.row * SIDE)
      compute(block)
      plgpu.commit_smem()
      for name, ref in results.items():
        place = block.place(ref, outputs[name].axes, block.row * SIDE)
        plgpu.copy_smem_to_gmem(result_tiles[name], place)
      plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
      scoped,
      {name: _tile(each.array, each.axes) for name, each in loaded.items()},
      {name: _tile(ref, outputs[name].axes) for name, ref in results.items()},
      [plgpu.SMEM(TILE, inputs["value"].array.dtype, transforms=_SWIZZLED)]
      * num_factors,
      [
        plgpu.Barrier(num_arrivals=others),
        plgpu.Barrier(num_arrivals=len(loaded) - others),
      ],
    )

  kernel = plgpu.kernel(
    run,
    out_type=tuple(each.shape for each in outputs.values()),
    grid=(len(visible), math.prod(problem.leading)),
    grid_names=("row", "leading"),
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=problem.interpret or None,
  )
  bounds = jnp.asarray(_bounds(visible != 0).ravel())
  arrays = [each.array for each in inputs.values()]
  return dict(zip(outputs, kernel(bounds, *arrays)))


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
    Axes.ROWS: (SIDE,),
    Axes.WHOLE: ref.shape,
  }
  is_factor = axes is Axes.TOKENS and ref.dtype.itemsize == 2
  transforms = _SWIZZLED if is_factor else ()
  return plgpu.SMEM(shapes[axes], ref.dtype, transforms=transforms)


def across(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[n] to [n, m]."""
  return jax.lax.broadcast_in_dim(column, shape, (0,))


def down(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[m] to [n, m]."""
  return jax.lax.broadcast_in_dim(row, shape, (1,))
