"""What the kernels for Hopper GPUs share: tiles of tokens and their scores.

A block of the grid has 64 *own* tokens, the rows of its tiles, and visits the
*other* tokens 64 at a time. Own tokens are queries, or keys in the kernel of
their gradients.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.operands import Plan
from attention.implementations.pallas.pairwise import Tile, values
from attention.masks.types import Below

SIDE = 64
TILE = (SIDE, SIDE)
LOG2_E = math.log2(math.e)
WGMMA = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = WGMMA.reduce(1), WGMMA.reduce(0)
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

# Which axis of an array, behind the leading ones, is that of tokens.
TOKENS, CHANNELS, ROWS, WHOLE = (True, False), (False, True), (True,), ()


class Part(NamedTuple):
  """An array in the device's memory, and a tile of it in shared memory."""

  ref: Any
  tile: Any
  axes: tuple[bool, ...]


class Block(NamedTuple):
  """A block of the grid."""

  problem: Any
  row: jax.Array  # of tiles
  entry: jax.Array  # of the leading axes

  def place(self, ref: Any, axes: tuple[bool, ...], start: Any) -> Any:
    """The tokens from `start` on, of this entry of the leading axes."""
    if not axes:
      return ref
    tokens = pl.ds(start, SIDE)
    core = [tokens if each else slice(None) for each in axes]
    return ref.at[(*self._leading(ref.shape[: -len(axes)]), *core)]

  def load(self, parts: Sequence[Part], start: Any, barrier: Any) -> None:
    """Copies tiles to shared memory and waits for them."""
    for ref, tile, axes in parts:
      plgpu.copy_gmem_to_smem(self.place(ref, axes, start), tile, barrier)
    plgpu.barrier_wait(barrier)

  def store(self, parts: Sequence[Part]) -> None:
    """Copies tiles of own tokens from shared memory."""
    plgpu.commit_smem()
    for ref, tile, axes in parts:
      plgpu.copy_smem_to_gmem(tile, self.place(ref, axes, self.row * SIDE))
    plgpu.wait_smem_to_gmem(0)

  def _leading(self, sizes: Sequence[int]) -> tuple[Any, ...]:
    """The indices along the leading axes; 0 where an array has size 1."""
    entry, indices = self.entry, []
    for size, own in zip(reversed(self.problem.leading), reversed(sizes)):
      index = jax.lax.rem(entry, jnp.int32(size))
      entry = jax.lax.div(entry, jnp.int32(size))
      indices.append(0 if own == 1 else index)
    return tuple(reversed(indices))


def current_block(problem: Any) -> Block:
  """The block that is computed."""
  row, entry = (jax.lax.axis_index(name) for name in ("row", "leading"))
  return Block(problem, row, entry)


def bounds(visible: np.ndarray) -> np.ndarray:
  """The first visited column of tiles and the end, of each row of tiles."""
  first = np.argmax(visible, axis=1)
  last = visible.shape[1] - np.argmax(visible[:, ::-1], axis=1)
  end = np.where(visible.any(axis=1), last, first)
  return np.stack([first, end], axis=1).astype(np.int32)


def shared_tile(ref: Any, axes: tuple[bool, ...]) -> Any:
  """Shared memory for a tile of an array."""
  if not axes:
    return plgpu.SMEM(ref.shape, ref.dtype)
  core = ref.shape[-len(axes) :]
  shape = tuple(SIDE if own else size for own, size in zip(axes, core))
  is_factor = axes == TOKENS and ref.dtype.itemsize == 2
  return plgpu.SMEM(shape, ref.dtype, transforms=_SWIZZLED if is_factor else ())


def factor_tile(dtype: Any) -> Any:
  """Shared memory for numbers of pairs that are a factor of a product."""
  return plgpu.SMEM(TILE, dtype, transforms=_SWIZZLED)


def scores(problem: Any, own: Any, other: Any, weight: Any) -> jax.Array:
  """Scores of a tile, in the layout of the tensor cores' results."""
  if not problem.is_additive:
    product = product_of_tokens(problem, own, other)
    return product if problem.factor == 1.0 else product * problem.factor

  def add(channel, sums):
    return sums + channel_tanh(problem, own, other, channel) * weight[channel]

  zeros = problem.cast(jnp.zeros(TILE, jnp.float32), WGMMA)
  return for_each_channel(own.shape[0], add, zeros)


def for_each_channel(channels: int, body: Any, state: Any) -> Any:
  """Calls body(channel, state) for all channels, four in an iteration."""
  count = 4 if channels % 4 == 0 else 1

  def several(number, state):
    for offset in range(count):
      state = body(number * count + offset, state)
    return state

  return jax.lax.fori_loop(0, channels // count, several, state)


def channel_tanh(problem: Any, own: Any, other: Any, channel: Any) -> jax.Array:
  """tanh(q + k) of the pairs of a tile, for one channel."""
  rows = problem.cast(own[channel], BY_ROW)
  columns = problem.cast(other[channel], BY_COLUMN)
  return jnp.tanh(across(rows, TILE) + down(columns, TILE))


def product_of_tokens(problem: Any, own: Any, other: Any) -> jax.Array:
  """The dot products of tokens [64, D] with tokens [64, D]."""
  if problem.interpret:  # the interpreter transposes no references
    return jnp.matmul(
      own[...], other[...].T, preferred_element_type=jnp.float32
    )

  def product(sums):
    plgpu.wgmma(sums, own, plgpu.transpose_ref(other, (1, 0)))
    return sums[...]

  return pl.run_scoped(product, plgpu.ACC(TILE, jnp.float32))


def masked(
  problem: Any, scores: jax.Array, starts: Sequence[Any], are_keys_own: bool
) -> jax.Array:
  """-inf for pairs that the mask hides, and after the last key."""
  masks = [] if problem.mask is None else [problem.mask]
  if problem.key_length % SIDE:
    masks.append(Below(problem.key_length))
  if not masks:
    return scores
  places = [
    problem.cast(jax.lax.broadcasted_iota(jnp.int32, TILE, axis), WGMMA) + start
    for axis, start in enumerate(starts)
  ]
  queries, keys = reversed(places) if are_keys_own else places
  at = Tile(Plan(), queries, keys, len(problem.leading))
  visible = functools.reduce(
    jnp.logical_and, [values(each, at) for each in masks]
  )
  return jnp.where(visible, scores, -jnp.inf)


def across(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[n] to [n, m]."""
  return jax.lax.broadcast_in_dim(column, shape, (0,))


def down(row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[m] to [n, m]."""
  return jax.lax.broadcast_in_dim(row, shape, (1,))
