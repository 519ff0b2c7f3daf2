"""The scores [..., T, S] cut into tiles along every axis, leading axes too.

The `start` of a tile is the position of its first entry along each axis. Along
an axis of size 1 all tiles use the only entry.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.positional.base import EMPTY, FULL, PARTIAL


@dataclasses.dataclass(frozen=True, eq=False)
class Tiling:
  """Tiles of [..., T, S], with T and S rounded up; equal by value."""

  leading: tuple[int, ...]  # of the context
  block: tuple[int, ...]  # a tile's size along each leading axis
  query_tile: int  # t
  key_tile: int  # s
  visibility: np.ndarray  # int8 [T / t, S / s] of EMPTY, PARTIAL and FULL

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Tiling) and self._value == other._value

  def __hash__(self) -> int:
    return hash(self._value)

  @property
  def _value(self) -> tuple:
    *sizes, visibility = (
      getattr(self, field.name) for field in dataclasses.fields(self)
    )
    return *sizes, visibility.shape, visibility.tobytes()

  @property
  def query_length(self) -> int:
    """T, rounded up."""
    return self.visibility.shape[0] * self.query_tile

  @property
  def key_length(self) -> int:
    """S, rounded up."""
    return self.visibility.shape[1] * self.key_tile

  @property
  def row(self) -> tuple[int, ...]:
    """The size of a tile of queries, [..., t]."""
    return (*self.block, self.query_tile)

  @property
  def column(self) -> tuple[int, ...]:
    """The size of a tile of keys, [..., s]."""
    return (*self.block, self.key_tile)

  @property
  def has_partial(self) -> bool:
    """Whether any tile needs the mask."""
    return bool((self.visibility == PARTIAL).any())

  @property
  def visits(self) -> list[tuple[int | None, int]]:
    """For FULL and PARTIAL tiles: their number in each row, and the most."""
    # The first is None if rows differ.
    counts = [(self.visibility == kind).sum(axis=1) for kind in (FULL, PARTIAL)]
    return [
      (int(each[0]) if (each == each[0]).all() else None, int(each.max()))
      for each in counts
    ]

  def rows(self) -> np.ndarray:
    """The starts of all tiles of queries, int32 [R, leading + 1]."""
    queries = range(0, self.query_length, self.query_tile)
    return _product(*self._starts_by_axis(), queries)

  def columns(self) -> tuple[np.ndarray, np.ndarray]:
    """The starts of visible tiles of keys, int32 [P]; bounds, int32 [R, 3]."""
    # For row r, `starts[bounds[r, 0]:bounds[r, 1]]` are those of FULL tiles and
    # `starts[bounds[r, 1]:bounds[r, 2]]` those of PARTIAL tiles.
    starts: list[int] = []
    bounds = []
    for row in self.visibility:
      begin = len(starts)
      starts += list(np.flatnonzero(row == FULL) * self.key_tile)
      middle = len(starts)
      starts += list(np.flatnonzero(row == PARTIAL) * self.key_tile)
      bounds.append((begin, middle, len(starts)))
    repeats = len(self.leading_starts())
    # The array of starts must not be empty, because programs index it.
    return (
      np.asarray(starts or [0], np.int32),
      np.tile(np.asarray(bounds, np.int32), (repeats, 1)),
    )

  def visible_tiles(self) -> np.ndarray:
    """The starts of all tiles that are not empty, int32 [P, leading + 2]."""
    rows, columns = np.nonzero(self.visibility != EMPTY)
    tiles = np.stack([rows * self.query_tile, columns * self.key_tile], axis=-1)
    return self.with_leading(tiles)

  def with_leading(self, tiles: np.ndarray) -> np.ndarray:
    """Starts [N, 2] along all axes, int32 [P, leading + 2]."""
    leading = self.leading_starts()
    starts = np.repeat(leading, len(tiles), axis=0)
    tiles = np.tile(tiles, (len(leading), 1))
    return np.concatenate([starts, tiles], axis=-1).astype(np.int32)

  def leading_starts(self) -> np.ndarray:
    """The starts of all tiles along the leading axes, int32 [P, leading]."""
    return _product(*self._starts_by_axis())

  def _starts_by_axis(self):
    return [
      range(0, size, block) for size, block in zip(self.leading, self.block)
    ]


def _product(*starts) -> np.ndarray:
  grid = np.meshgrid(*map(np.asarray, starts), indexing="ij")
  if not grid:
    return np.zeros((1, 0), np.int32)
  return np.stack([axis.ravel() for axis in grid], axis=-1).astype(np.int32)


def cut(array, start: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
  """The tile of `array` at `start`, cut along the first `len(sizes)` axes."""
  sizes = [min(size, own) for size, own in zip(sizes, array.shape)]
  sizes += array.shape[len(sizes) :]
  if tuple(sizes) == array.shape:
    return array
  return jax.lax.dynamic_slice(array, _starts(array, start), sizes)


def cut_columns(tiling: Tiling, columns: jax.Array, start) -> jax.Array:
  """The columns [..., D, s] of a tile, of columns [..., D, S]."""
  size = (*tiling.block, columns.shape[-2], tiling.key_tile)
  return cut(columns, (*start[:-2], 0, start[-1]), size)


def put(array: jax.Array, tile: jax.Array, start: Sequence[Any]) -> jax.Array:
  """Replaces the tile of `array` at `start`."""
  if tile.shape == array.shape:
    return tile
  return jax.lax.dynamic_update_slice(array, tile, _starts(array, start))


def add(array: jax.Array, tile: jax.Array, start: Sequence[Any]) -> jax.Array:
  """Adds `tile` to `array` at `start`."""
  # XLA adds in place without making these zeros, and the transpose is a `cut`.
  return array + put(jnp.zeros_like(array), tile, start)


def _starts(array, start):
  starts = list(start) + [0] * (array.ndim - len(start))
  return [
    jnp.asarray(0 if size == 1 else begin, jnp.int32)
    for begin, size in zip(starts, array.shape)
  ]


def scan(step: Callable, carry: Any, inputs: Any) -> Any:
  """The last carry of `jax.lax.scan`; a single step needs no loop."""
  if len(jax.tree.leaves(inputs)[0]) == 1:
    return step(carry, jax.tree.map(lambda array: array[0], inputs))
  return jax.lax.scan(lambda *each: (step(*each), None), carry, inputs)[0]


def with_length(
  array: jax.Array, length: int, mode: str = "edge", axis: int = -2
) -> jax.Array:
  """Shortens an axis to `length`, or pads it in a mode of `jnp.pad`."""
  missing = length - array.shape[axis]
  if not missing:
    return array
  if missing < 0:
    return jax.lax.slice_in_dim(array, 0, length, axis=axis)
  widths = [(0, 0)] * array.ndim
  widths[axis] = (0, missing)
  return jnp.pad(array, widths, mode=mode)
