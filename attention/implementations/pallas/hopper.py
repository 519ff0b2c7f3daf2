"""Kernels for Hopper GPUs: dot products and additive scores.

A warpgroup holds 64 queries, or 64 keys for their gradients; scores and sums
stay in its registers. Products use the tensor cores. The additive score adds
channel by channel: a hyperbolic tangent (`tanh.approx`, with a relative error
of 2^-11), an addition and a multiply-add for each pair.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas import hopper_forward, hopper_gradient
from attention.implementations.pallas.hopper_tiles import SIDE, TILE, bounds
from attention.implementations.pallas.operands import (
  Kind,
  Operand,
  Plan,
  Unsupported,
)
from attention.implementations.pallas.pairwise import Tile, values
from attention.masks.tile_visibility import grid_visibility
from attention.masks.types import Mask
from attention.request import Request
from attention.scores import MappedKeys, Score
from attention.scores.classical import AdditiveProduct, DotProduct, ScaledDot
from attention.softmax import Statistics

_HALF = ("bfloat16", "float16")
# The features or channels for which the gradients' sums fit into a block.
_GRADIENT_FEATURES = 128


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


def make_problem(request: Request, query, key, interpret: Any) -> "Problem":
  """The kernels of a request, for mapped queries and keys."""
  check(request, query, key)
  score = bare(request.score)
  is_additive = isinstance(score, AdditiveProduct)
  factor, operands = 1.0, []
  if is_additive:
    operands = [Operand(jnp.asarray(score.score_weight), Kind.WHOLE, ())]
  elif isinstance(score, ScaledDot):
    factor = float(score.factor(query))
  return Problem(
    request.leading,
    request.scores_shape[-1],
    grid_visibility(request.mask, request.scores_shape[-2:], TILE),
    request.mask,
    is_additive,
    factor,
    query.shape[-1] <= _GRADIENT_FEATURES,
    operands,
    request.is_masked,
    interpret,
  )


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """What the kernels need besides arrays."""

  leading: tuple[int, ...]
  key_length: int
  tiles: np.ndarray  # visibility, int8 [T / 64, S / 64]
  mask: Mask | None  # without arrays
  is_additive: bool  # a score v . tanh(q + k), or else a dot product
  factor: float  # of a dot product
  has_gradients: bool
  score_operands: Sequence[Operand]  # the weight of an additive score
  # Whether keys may be hidden. NaN in a hidden token then changes nothing, and
  # the rows that attend to NaN become NaN, without derivatives.
  is_masked: bool
  interpret: Any
  dtype: ClassVar[Any] = jnp.float32

  @property
  def arrays(self) -> list[jax.Array]:
    """The arrays of all operands."""
    return [each.array for each in self.score_operands]

  @property
  def padded_lengths(self) -> tuple[int, int]:
    """T and S, rounded up to tiles."""
    rows, columns = self.tiles.shape
    return rows * SIDE, columns * SIDE

  def cast(self, array: jax.Array, layout: Any) -> jax.Array:
    """An array in a layout of registers; the interpreter has none."""
    return array if self.interpret else plgpu.layout_cast(array, layout)

  def forward(
    self, operands: Sequence[jax.Array], query, key, value
  ) -> tuple[jax.Array, Statistics]:
    """The context, in the query's dtype, and the statistics."""
    lengths = (*self.leading, query.shape[-2])
    results = [
      jax.ShapeDtypeStruct((*lengths, value.shape[-1]), value.dtype),
      *[jax.ShapeDtypeStruct(lengths, jnp.float32)] * 2,
    ]
    arrays = [*self._mapped(query, key), self._finite(value)]
    if not self.is_masked:
      arrays += _widened(operands)
      call = self._call(hopper_forward.run_block, self.tiles, arrays, results)
      context, maximum, total = call
      return context, Statistics(maximum, total)
    flags = jnp.maximum(2.0 * _is_bad(key), 1.0 * _is_bad(value))
    context, maximum, total, spoilt = self._call(
      hopper_forward.run_block,
      self.tiles,
      [*arrays, flags, *_widened(operands)],
      [*results, jax.ShapeDtypeStruct(lengths, jnp.float32)],
      jnp.max(flags).astype(jnp.int32),
    )
    bad = (spoilt > 1.0) | (_is_bad(query) & (total != 0.0))
    maximum, total = (
      jnp.where(bad, jnp.nan, each) for each in (maximum, total)
    )
    of_context = (bad | (spoilt > 0.0))[..., None]
    return jnp.where(of_context, jnp.nan, context), Statistics(maximum, total)

  def gradient_of_queries(
    self, operands, tokens, rows, cotangent, wanted: Sequence[int]
  ) -> tuple[jax.Array, list[jax.Array]]:
    """The gradients of the queries and of the wanted operands of the score."""
    results = [self._gradient(tokens[0])] * (1 + self.is_additive)
    of_query, *of_weight = self._call(
      functools.partial(hopper_gradient.run_block, are_keys_own=False),
      self.tiles,
      self._inputs(operands, tokens, rows, cotangent),
      results,
    )
    # One row of each channel is that of one query.
    of_weight = [jnp.sum(each, axis=-1) for each in of_weight if wanted]
    return self._of_tokens(of_query), of_weight

  def gradient_of_keys(
    self, operands, tokens, rows, cotangent
  ) -> tuple[jax.Array, jax.Array]:
    """The gradients of the keys and the values."""
    _, key, value = tokens
    shape = (*self.leading, *value.shape[-2:])
    of_key, of_value = self._call(
      functools.partial(hopper_gradient.run_block, are_keys_own=True),
      self.tiles.T,
      self._inputs(operands, tokens, rows, cotangent),
      [
        self._gradient(key),
        jax.ShapeDtypeStruct(shape, self._sum_dtype(value)),
      ],
    )
    return self._of_tokens(of_key), of_value

  def _call(self, block, visible, arrays, results, *numbers) -> Any:
    """Calls a kernel, with a block for each row of tiles and leading entry."""
    kernel = plgpu.kernel(
      functools.partial(block, self),
      out_type=tuple(results),
      grid=(len(visible), math.prod(self.leading)),
      grid_names=("row", "leading"),
      compiler_params=plgpu.CompilerParams(approx_math=True),
      interpret=self.interpret or None,
    )
    scalars = [jnp.asarray(bounds(visible != 0).ravel())]
    scalars += [each.reshape(1) for each in numbers]
    return kernel(jnp.concatenate(scalars), *arrays)

  def _inputs(self, operands, tokens, rows, cotangent) -> list[jax.Array]:
    """The arrays that kernels of gradients read."""
    query, key, value = tokens
    maximum, total, mean = rows
    if self.is_masked:  # a mark of rows that are NaN
      spoilt = (total < 0.0)[..., None]
      cotangent = jnp.where(spoilt, jnp.zeros_like(cotangent), cotangent)
    empty = total == 0.0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, abs(total)))
    query, key = self._mapped(query, key)
    arrays = query, cotangent, maximum, inverse, mean, key, self._finite(value)
    return [*arrays, *_widened(operands)]

  def _finite(self, tokens: jax.Array) -> jax.Array:
    """Zero for NaN and infinity, if keys may be hidden."""
    if not self.is_masked:
      return tokens
    return jnp.where(jnp.isfinite(tokens), tokens, jnp.zeros_like(tokens))

  def _mapped(self, query, key) -> list[jax.Array]:
    """The query and key as kernels read them."""
    query, key = self._finite(query), self._finite(key)
    if not self.is_additive:
      return [query, key]
    # Channels are rows, so that a channel of a tile is contiguous.
    return _widened([jnp.swapaxes(each, -1, -2) for each in (query, key)])

  def _gradient(self, tokens) -> jax.ShapeDtypeStruct:
    """What a kernel returns for the gradient of mapped tokens."""
    length, size = tokens.shape[-2:]
    core = (size, length) if self.is_additive else (length, size)
    dtype = self.dtype if self.is_additive else self._sum_dtype(tokens)
    return jax.ShapeDtypeStruct((*self.leading, *core), dtype)

  def _of_tokens(self, gradient: jax.Array) -> jax.Array:
    return jnp.swapaxes(gradient, -1, -2) if self.is_additive else gradient

  def _sum_dtype(self, tokens) -> Any:
    """That of sums if a gradient is summed over leading axes."""
    return tokens.dtype if tokens.shape[:-2] == self.leading else self.dtype


def _is_bad(tokens: jax.Array) -> jax.Array:
  """Which tokens [..., D] have NaN or infinity."""
  return ~jnp.all(jnp.isfinite(tokens), axis=-1)


def _widened(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  return [each.astype(jnp.float32) for each in arrays]
