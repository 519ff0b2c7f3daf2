"""Forward kernel for Hopper GPUs: dot products and additive scores.

A warpgroup holds 64 queries; scores and sums stay in its registers. Products
use the tensor cores. The additive score adds channel by channel: a hyperbolic
tangent (`tanh.approx`, with a relative error of 2^-11), an addition and a
multiply-add for each pair.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.operands import Plan, Unsupported
from attention.implementations.pallas.pairwise import Tile, values
from attention.masks.types import Below, Mask
from attention.request import Request
from attention.scores import MappedKeys, Score
from attention.scores.classical import AdditiveProduct, DotProduct, ScaledDot
from attention.softmax import Statistics

TILE = (64, 64)
_HALF = ("bfloat16", "float16")
_LOG2_E = math.log2(math.e)
_LOWEST = float(np.finfo(np.float32).min)
_WGMMA = plgpu.Layout.WGMMA
_BY_ROW, _BY_COLUMN = _WGMMA.reduce(1), _WGMMA.reduce(0)
_SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def bare(score: Score) -> Any:
  """The score, without wrappers that change its maps only."""
  while isinstance(score, MappedKeys):
    score = score.score
  return score


def check(request: Request, query, key) -> None:
  """Raises `Unsupported` for what the kernel does not support."""
  score = bare(request.score)
  is_additive = isinstance(score, AdditiveProduct)
  name = type(score).__name__
  if not is_additive and not isinstance(score, DotProduct):
    raise Unsupported(f"has dot products and additive scores only, got {name}")
  if isinstance(score, ScaledDot) and not isinstance(
    score.factor(query), float | int
  ):
    raise Unsupported("needs a scale that is a number")
  if is_additive and jnp.ndim(score.score_weight) != 1:
    raise Unsupported("needs a score_weight of one axis")
  if request.bias is not None:
    raise Unsupported("does not support a bias")
  if request.mask is not None:
    plan, one = Plan(), jnp.zeros((1, 1), jnp.int32)
    values(request.mask, Tile(plan, one, one, len(request.leading)))
    if plan.operands:
      raise Unsupported("needs a mask without arrays")
  halves = (request.value,) if is_additive else (query, key, request.value)
  if any(str(each.dtype) not in _HALF for each in halves):
    raise Unsupported("needs tokens of bfloat16 or float16")
  size, features = request.value.shape[-1], query.shape[-1]
  if size % 64 or size > 128 or (not is_additive and features % 64):
    raise Unsupported(
      f"needs features that are a multiple of 64, and at most 128 of values, "
      f"got {features} and {size}"
    )
  if features > 256:
    raise Unsupported(f"has at most 256 features or channels, got {features}")


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """What the kernel needs besides arrays."""

  leading: tuple[int, ...]
  key_length: int
  tiles: np.ndarray  # visibility, int8 [T / 64, S / 64]
  mask: Mask | None  # without arrays
  score: Any
  interpret: Any
  dtype: ClassVar[Any] = jnp.float32
  has_gradients: ClassVar[bool] = False
  # NaN in hidden tokens is replaced outside of the kernel.
  is_masked: ClassVar[bool] = False

  @property
  def is_additive(self) -> bool:
    """Whether the score is v . tanh(q + k)."""
    return isinstance(self.score, AdditiveProduct)

  @property
  def padded_lengths(self) -> tuple[int, int]:
    """T and S, rounded up to tiles."""
    rows, columns = self.tiles.shape
    return rows * TILE[0], columns * TILE[1]

  def cast(self, array: jax.Array, layout: Any) -> jax.Array:
    """An array in a layout of registers; the interpreter has none."""
    return array if self.interpret else plgpu.layout_cast(array, layout)

  def forward(
    self, operands: Sequence[jax.Array], query, key, value
  ) -> tuple[jax.Array, Statistics]:
    """The context, in the query's dtype, and the statistics."""
    arrays = [query, key, value]
    if self.is_additive:
      # Channels are rows, so that a channel of a tile is contiguous.
      arrays[:2] = (
        jnp.swapaxes(each, -1, -2).astype(jnp.float32) for each in (query, key)
      )
      arrays.append(operands[0].astype(jnp.float32))
    seen = self.tiles != 0
    first = np.argmax(seen, axis=1)
    last = self.tiles.shape[1] - np.argmax(seen[:, ::-1], axis=1)
    bounds = np.stack([first, np.where(seen.any(axis=1), last, first)], axis=1)
    shape = (*self.leading, query.shape[-2])
    context, maximum, total = plgpu.kernel(
      functools.partial(_entry, self, [each.shape for each in arrays]),
      out_type=(
        jax.ShapeDtypeStruct((*shape, value.shape[-1]), value.dtype),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
      ),
      grid=(len(self.tiles), math.prod(self.leading)),
      grid_names=("row", "leading"),
      compiler_params=plgpu.CompilerParams(approx_math=True),
      interpret=self.interpret or None,
    )(jnp.asarray(bounds.ravel(), jnp.int32), *arrays)
    return context, Statistics(maximum, total)


def _entry(problem, shapes, *refs):
  """Allocates shared memory and barriers."""
  (queries, keys), size = TILE, shapes[2][-1]
  features = shapes[0][-2] if problem.is_additive else shapes[0][-1]
  dtype, wide = refs[3].dtype, jnp.float32
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
    functools.partial(_kernel, problem, [*shapes], refs),
    *tokens,
    plgpu.SMEM((keys, size), dtype, transforms=_SWIZZLED),
    plgpu.SMEM((queries, keys), dtype, transforms=_SWIZZLED),
    plgpu.SMEM((queries, size), dtype, transforms=_SWIZZLED),
    plgpu.SMEM((queries,), wide),
    plgpu.SMEM((queries,), wide),
    plgpu.Barrier(num_arrivals=1 + problem.is_additive),
    plgpu.Barrier(num_arrivals=2),
  )


def _kernel(
  problem,
  shapes,
  refs,
  query_tile,
  key_tile,
  weights_tile,
  value_tile,
  exponentials_tile,
  context_tile,
  maximum_tile,
  total_tile,
  query_barrier,
  key_barrier,
):
  """64 queries of one entry of the leading axes: the online softmax."""
  bounds, query_ref, key_ref, value_ref, *rest = refs
  *weight_ref, context_ref, maximum_ref, total_ref = rest
  (queries, keys), size = TILE, shapes[2][-1]
  row, entry = jax.lax.axis_index("row"), jax.lax.axis_index("leading")
  at = functools.partial(_entry_of, entry, problem.leading)
  at_queries = pl.ds(row * queries, queries)
  is_additive = problem.is_additive

  def tokens_at(shape, start, length):
    place = pl.ds(start, length)
    core = (slice(None), place) if is_additive else (place, slice(None))
    return (*at(shape[:-2]), *core)

  plgpu.copy_gmem_to_smem(
    query_ref.at[tokens_at(shapes[0], row * queries, queries)],
    query_tile,
    query_barrier,
  )
  if is_additive:
    plgpu.copy_gmem_to_smem(weight_ref[0], weights_tile, query_barrier)
  plgpu.barrier_wait(query_barrier)

  def visit(column, state):
    summed, maximum, total = state
    start = column * keys
    plgpu.copy_gmem_to_smem(
      key_ref.at[tokens_at(shapes[1], start, keys)], key_tile, key_barrier
    )
    plgpu.copy_gmem_to_smem(
      value_ref.at[(*at(shapes[2][:-2]), pl.ds(start, keys))],
      value_tile,
      key_barrier,
    )
    plgpu.barrier_wait(key_barrier)
    scores = _scores(problem, query_tile, key_tile, weights_tile)
    scores = _masked(problem, scores, row * queries, start)
    after = jnp.maximum(maximum, jnp.max(scores, axis=1) * _LOG2_E)
    shrink = jnp.exp2(maximum - after)
    exponentials = jnp.exp2(scores * _LOG2_E - _across(after, TILE))
    total = total * shrink + jnp.sum(exponentials, axis=1)
    exponentials_tile[...] = exponentials.astype(exponentials_tile.dtype)
    plgpu.commit_smem()

    def product(sums):
      plgpu.wgmma(sums, exponentials_tile, value_tile)
      return sums[...]

    shape = (queries, size)
    product = pl.run_scoped(product, plgpu.ACC(shape, jnp.float32))
    return summed * _across(shrink, shape) + product, after, total

  zeros = jnp.zeros((queries,), jnp.float32)
  state = (
    problem.cast(jnp.zeros((queries, size), jnp.float32), _WGMMA),
    problem.cast(zeros + _LOWEST, _BY_ROW),
    problem.cast(zeros, _BY_ROW),
  )
  summed, maximum, total = jax.lax.fori_loop(
    bounds[2 * row], bounds[2 * row + 1], visit, state
  )
  is_empty = total == 0.0
  divisor = jnp.where(is_empty, 1.0, total)
  context = summed / _across(divisor, (queries, size))
  context_tile[...] = context.astype(context_tile.dtype)
  maximum_tile[...] = jnp.where(is_empty, _LOWEST, maximum / _LOG2_E)
  total_tile[...] = total
  plgpu.commit_smem()
  own = at(problem.leading)
  for tile, ref in (
    (context_tile, context_ref),
    (maximum_tile, maximum_ref),
    (total_tile, total_ref),
  ):
    plgpu.copy_smem_to_gmem(tile, ref.at[(*own, at_queries)])
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


def _entry_of(entry, leading, sizes) -> tuple[Any, ...]:
  """The indices along leading axes; 0 where an array has size 1."""
  indices = []
  for size, own in zip(reversed(leading), reversed(sizes)):
    index = jax.lax.rem(entry, jnp.int32(size))
    entry = jax.lax.div(entry, jnp.int32(size))
    indices.append(0 if own == 1 else index)
  return tuple(reversed(indices))
