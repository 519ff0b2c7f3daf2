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
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper_kernel import TILE, run_block
from attention.implementations.pallas.operands import Plan, Unsupported
from attention.implementations.pallas.pairwise import Tile, values
from attention.masks.types import Mask
from attention.request import Request
from attention.scores import MappedKeys, Score
from attention.scores.classical import AdditiveProduct, DotProduct, ScaledDot
from attention.softmax import Statistics

_HALF = ("bfloat16", "float16")


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
      functools.partial(run_block, self, [each.shape for each in arrays]),
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
