"""Masks, biases and dropout of one tile."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from attention import axes
from attention.biases import Bias
from attention.dropout import Dropout
from attention.implementations.blockwise.tiles import Tiling, cut, put, scan
from attention.masks.types import Mask
from attention.positional import Pairwise, TilePositions


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
  """The mask, bias and dropout of the tile at a given `start`."""

  tiling: Tiling
  length: int
  key_length: int
  mask: Mask | None
  bias: Bias | None
  dtype: Any

  def visible(self, start) -> jax.Array:
    """Which pairs are visible, bool, broadcasts to [..., t, s]."""
    _, columns = self._positions(start)
    visible = columns.array[None, :] < self.key_length
    visible = axes.with_rank(visible, len(self.tiling.leading) + 2)
    if self.mask is None:
      return visible
    return visible & self._tile(self.mask, start)

  def bias_tile(self, start) -> jax.Array:
    """The bias of a tile."""
    assert self.bias is not None
    return self._tile(self.bias, start).astype(self.dtype)

  def allowed(self, start) -> jax.Array:
    """Which pairs neither the mask nor a bias of -inf hides."""
    visible = self.visible(start)
    if self.bias is None:
      return visible
    return visible & ~jnp.isneginf(self._tile(self.bias, start))

  def multiplier(self, dropout: Dropout | None, start) -> jax.Array:
    """The factors by which dropout multiplies the weights."""
    assert dropout is not None
    leading = self.tiling.leading
    numbers = jnp.arange(math.prod(leading)).reshape(leading)
    numbers = cut(numbers, start[:-2], self.tiling.block)
    rows, columns = self._positions(start)
    shape = (*leading, self.length, self.key_length)
    return dropout.block(rows, columns, numbers, shape, self.dtype)

  def _positions(self, start):
    return (
      TilePositions(start[-2], self.tiling.query_tile),
      TilePositions(start[-1], self.tiling.key_tile),
    )

  def _tile(self, pairs: Pairwise, start):
    rank = len(self.tiling.leading)
    rows, columns = self._positions(start)
    block = pairs.block(rows, columns, rank)
    block = axes.with_rank(block, rank + 2)
    return cut(block, start[:-2], self.tiling.block)


def rows_that_see(pairs: Pairs, flags: jax.Array) -> jax.Array:
  """Which queries attend to a flagged key: bool [..., S] to bool [..., T]."""
  tiling = pairs.tiling
  missing = tiling.key_length - flags.shape[-1]
  flags = jnp.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, missing)])
  shape = (*tiling.leading, tiling.query_length)
  none = axes.varying_zero((flags, pairs.mask, pairs.bias), jnp.bool_)
  none = jnp.broadcast_to(none, shape)
  # Usually no key is flagged. Outside of jit a `cond` compiles at every call.
  if not isinstance(flags, jax.core.Tracer) and not flags.any():
    return none[..., : pairs.length]

  def step(rows, start):
    *row, column = start
    flagged = cut(flags, (*row[:-1], column), tiling.column)
    seen = jnp.any(pairs.allowed(start) & flagged[..., None, :], axis=-1)
    return put(rows, seen | cut(rows, row, tiling.row), row)

  rows = jax.lax.cond(
    jnp.any(flags), lambda: scan(step, none, tiling.pairs()), lambda: none
  )
  return rows[..., : pairs.length]
