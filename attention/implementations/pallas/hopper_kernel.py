"""One block of the grid of the kernel in `hopper.py`."""

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
from attention.scores.classical import ScaledDot

TILE = (64, 64)
_LOG2_E = math.log2(math.e)
_LOWEST = float(np.finfo(np.float32).min)
_WGMMA = plgpu.Layout.WGMMA
_BY_ROW, _BY_COLUMN = _WGMMA.reduce(1), _WGMMA.reduce(0)
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


class _Scratch(NamedTuple):
  """Shared memory and barriers of a block."""

  query: Any
  key: Any
  weight: Any  # of the channels; unused for dot products
  value: Any
  exponentials: Any
  context: Any
  maximum: Any
  total: Any
  query_barrier: Any
  key_barrier: Any


class _Refs(NamedTuple):
  """Arguments and results, in the memory of the device."""

  bounds: Any
  query: Any
  key: Any
  value: Any
  weight: Any  # None for dot products
  context: Any
  maximum: Any
  total: Any


class _Block(NamedTuple):
  """The tokens of a block of the grid."""

  problem: Any
  shapes: Sequence[tuple[int, ...]]  # of queries, keys and values
  row: jax.Array  # of tiles
  entry: jax.Array  # of the leading axes

  def tokens(self, number: int, start, length: int) -> tuple[Any, ...]:
    """The index of tokens in the array of a number: 0 for queries, 1, 2."""
    place, shape = pl.ds(start, length), self.shapes[number]
    is_transposed = self.problem.is_additive and number < 2
    core = (slice(None), place) if is_transposed else (place, slice(None))
    return (*self.leading(shape[:-2]), *core)

  def leading(self, sizes: Sequence[int]) -> tuple[Any, ...]:
    """The indices along the leading axes; 0 where an array has size 1."""
    entry, indices = self.entry, []
    for size, own in zip(reversed(self.problem.leading), reversed(sizes)):
      index = jax.lax.rem(entry, jnp.int32(size))
      entry = jax.lax.div(entry, jnp.int32(size))
      indices.append(0 if own == 1 else index)
    return tuple(reversed(indices))


def run_block(problem, shapes, *refs):
  """Allocates shared memory and barriers."""
  (queries, keys), size = TILE, shapes[2][-1]
  features = shapes[0][-2] if problem.is_additive else shapes[0][-1]
  dtype, wide = refs[3].dtype, jnp.float32
  bounds, query, key, value, *weight, context, maximum, total = refs
  named = _Refs(
    *(bounds, query, key, value, weight[0] if weight else None),
    *(context, maximum, total),
  )
  if problem.is_additive:
    tokens = [
      plgpu.SMEM((features, queries), wide),
      plgpu.SMEM((features, keys), wide),
      plgpu.SMEM((features,), wide),
    ]
  else:
    tokens = [
      plgpu.SMEM((queries, features), dtype, transforms=_SWIZZLED),
      plgpu.SMEM((keys, features), dtype, transforms=_SWIZZLED),
      plgpu.SMEM((keys,), wide),
    ]
  pl.run_scoped(
    lambda *scratch: _kernel(problem, shapes, named, _Scratch(*scratch)),
    *tokens,
    plgpu.SMEM((keys, size), dtype, transforms=_SWIZZLED),
    plgpu.SMEM((queries, keys), dtype, transforms=_SWIZZLED),
    plgpu.SMEM((queries, size), dtype, transforms=_SWIZZLED),
    plgpu.SMEM((queries,), wide),
    plgpu.SMEM((queries,), wide),
    plgpu.Barrier(num_arrivals=1 + problem.is_additive),
    plgpu.Barrier(num_arrivals=2),
  )


def _kernel(problem, shapes, refs: _Refs, scratch: _Scratch):
  """64 queries of one entry of the leading axes: the online softmax."""
  queries, size = TILE[0], shapes[2][-1]
  row, entry = jax.lax.axis_index("row"), jax.lax.axis_index("leading")
  block = _Block(problem, shapes, row, entry)
  _load_queries(block, refs, scratch)
  zeros = jnp.zeros((queries,), jnp.float32)
  state = (
    problem.cast(jnp.zeros((queries, size), jnp.float32), _WGMMA),
    problem.cast(zeros + _LOWEST, _BY_ROW),
    problem.cast(zeros, _BY_ROW),
  )
  state = jax.lax.fori_loop(
    refs.bounds[2 * row],
    refs.bounds[2 * row + 1],
    functools.partial(_visit, block, refs, scratch),
    state,
  )
  _write(block, refs, scratch, *state)


def _load_queries(block: _Block, refs: _Refs, scratch: _Scratch) -> None:
  queries = TILE[0]
  plgpu.copy_gmem_to_smem(
    refs.query.at[block.tokens(0, block.row * queries, queries)],
    scratch.query,
    scratch.query_barrier,
  )
  if refs.weight is not None:
    plgpu.copy_gmem_to_smem(refs.weight, scratch.weight, scratch.query_barrier)
  plgpu.barrier_wait(scratch.query_barrier)


def _load_keys(block: _Block, refs: _Refs, scratch: _Scratch, start) -> None:
  for number, ref, tile in (
    (1, refs.key, scratch.key),
    (2, refs.value, scratch.value),
  ):
    plgpu.copy_gmem_to_smem(
      ref.at[block.tokens(number, start, TILE[1])], tile, scratch.key_barrier
    )
  plgpu.barrier_wait(scratch.key_barrier)


def _visit(block: _Block, refs: _Refs, scratch: _Scratch, column, state):
  """Adds a tile of keys to the sums of the queries."""
  summed, maximum, total = state
  queries, keys = TILE
  _load_keys(block, refs, scratch, column * keys)
  scores = _scores(block.problem, scratch.query, scratch.key, scratch.weight)
  first = block.row * queries, column * keys
  scores = _masked(block.problem, scores, *first)
  after = jnp.maximum(maximum, jnp.max(scores, axis=1) * _LOG2_E)
  shrink = jnp.exp2(maximum - after)
  exponentials = jnp.exp2(scores * _LOG2_E - _across(after, TILE))
  total = total * shrink + jnp.sum(exponentials, axis=1)
  scratch.exponentials[...] = exponentials.astype(scratch.exponentials.dtype)
  plgpu.commit_smem()

  def product(sums):
    plgpu.wgmma(sums, scratch.exponentials, scratch.value)
    return sums[...]

  product = pl.run_scoped(product, plgpu.ACC(summed.shape, jnp.float32))
  return summed * _across(shrink, summed.shape) + product, after, total


def _write(
  block: _Block, refs: _Refs, scratch: _Scratch, summed, maximum, total
) -> None:
  """Writes the context and the statistics."""
  is_empty = total == 0.0
  context = summed / _across(jnp.where(is_empty, 1.0, total), summed.shape)
  scratch.context[...] = context.astype(scratch.context.dtype)
  scratch.maximum[...] = jnp.where(is_empty, _LOWEST, maximum / _LOG2_E)
  scratch.total[...] = total
  plgpu.commit_smem()
  own = block.leading(block.problem.leading)
  place = pl.ds(block.row * TILE[0], TILE[0])
  for tile, ref in (
    (scratch.context, refs.context),
    (scratch.maximum, refs.maximum),
    (scratch.total, refs.total),
  ):
    plgpu.copy_smem_to_gmem(tile, ref.at[(*own, place)])
  plgpu.wait_smem_to_gmem(0)


def _scores(problem, query, key, weight):
  """Scores of a tile, in the layout of the tensor cores' results."""
  if problem.is_additive:
    channels = query.shape[0]
    count = 4 if channels % 4 == 0 else 1

    def add(number, scores):
      for offset in range(count):
        channel = number * count + offset
        hidden = jnp.tanh(
          _across(problem.cast(query[channel], _BY_ROW), TILE)
          + _down(problem.cast(key[channel], _BY_COLUMN), TILE)
        )
        scores = scores + hidden * weight[channel]
      return scores

    zeros = problem.cast(jnp.zeros(TILE, jnp.float32), _WGMMA)
    return jax.lax.fori_loop(0, channels // count, add, zeros)

  def product(sums):
    plgpu.wgmma(sums, query, plgpu.transpose_ref(key, (1, 0)))
    return sums[...]

  if problem.interpret:  # the interpreter transposes no references
    scores = jnp.matmul(
      query[...], key[...].T, preferred_element_type=jnp.float32
    )
  else:
    scores = pl.run_scoped(product, plgpu.ACC(TILE, jnp.float32))
  if isinstance(problem.score, ScaledDot):
    scores = scores * float(problem.score.factor(query))
  return scores


def _masked(problem, scores, first_query, first_key):
  """-inf for pairs that the mask hides, and after the last key."""
  masks = [] if problem.mask is None else [problem.mask]
  if problem.key_length % TILE[1]:
    masks.append(Below(problem.key_length))
  if not masks:
    return scores
  queries, keys = (
    problem.cast(jax.lax.broadcasted_iota(jnp.int32, TILE, axis), _WGMMA)
    + first
    for axis, first in enumerate((first_query, first_key))
  )
  at = Tile(Plan(), queries, keys, len(problem.leading))
  visible = functools.reduce(
    jnp.logical_and, [values(each, at) for each in masks]
  )
  return jnp.where(visible, scores, -jnp.inf)


def _across(column, shape):
  """[n] to [n, m]."""
  return jax.lax.broadcast_in_dim(column, shape, (0,))


def _down(row, shape):
  """[m] to [n, m]."""
  return jax.lax.broadcast_in_dim(row, shape, (1,))
