"""Maps of tokens before the kernels for Hopper GPUs, and their derivatives.

XLA computes a map, a product or a norm, in one kernel, but the transpose of a
norm in several. A kernel of this module computes that at once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from attention.custom_transpose import with_kernel_as_transpose
from attention.implementations.closure import (
  Program,
  without_captured,
)
from attention.implementations.pallas.hopper import row_functions
from attention.implementations.pallas.hopper.row_functions import RowFunction
from attention.implementations.pallas.hopper.tiles import SIDE
from attention.implementations.pallas.operands import Unsupported
from attention.scores import Score
from attention.scores.base import Wrapper
from attention.scores.classical import (
  Additive,
  Concat,
  Cosine,
  Dot,
  General,
  ScaledDot,
)
from attention.scores.wrappers import QueryKeyNorm

# Scores whose mapped tokens have NaN or infinity if the tokens have: in some
# feature, and in each one if they are projected.
_KEEP_NAN = (Additive, Concat, Cosine, Dot, General, ScaledDot)


def keeps_nan(score: Any) -> bool:
  """Whether the maps of a score need no flags of tokens with NaN."""
  if not isinstance(score, Wrapper):
    return type(score) in _KEEP_NAN or not _overrides(score, Score)
  is_known = isinstance(score, QueryKeyNorm) or not _overrides(score, Wrapper)
  return is_known and keeps_nan(score.score)


def _overrides(score: Any, base: type[Score]) -> bool:
  return any(
    getattr(type(score), name) is not getattr(base, name)
    for name in ("map_query", "map_key")
  )


def mapped(
  function: Callable[[jax.Array], jax.Array],
  tokens: jax.Array,
  *,
  is_masked: bool,
  interpret: Any,
) -> jax.Array:
  """function(tokens), which keeps NaN.

  If keys may be hidden, derivatives are those at finite tokens.
  """
  program, captured = without_captured(function, tokens)
  of_tile = _tile_program(function, tokens, captured)

  @jax.custom_jvp
  def compute(arrays):
    return program(arrays[1:], arrays[0])

  @functools.partial(compute.defjvp, symbolic_zeros=True)
  def rule(primals, tangents):
    (arrays,), (moved,) = primals, tangents
    result = compute(arrays)
    chosen = [n for n, x in enumerate(moved) if type(x) is not SymbolicZero]
    if not chosen:
      return result, jnp.zeros_like(result)
    pull_back = _pull_back(of_tile, arrays, chosen, is_masked)
    transpose = None
    if pull_back is not None:
      transpose = functools.partial(_transpose, pull_back, chosen, interpret)
    (tangent,) = with_kernel_as_transpose(
      functools.partial(_tangent, program, chosen, is_masked),
      transpose,
      arrays,
      [moved[n] for n in chosen],
    )
    return result, tangent

  return compute([tokens, *captured])


def _tangent(
  program: Program, chosen: Sequence[int], is_masked: bool, arrays, tangents
) -> list[jax.Array]:
  """The tangent of a map."""
  arrays = [_finite(arrays[0]) if is_masked else arrays[0], *arrays[1:]]
  result = jax.jvp(
    functools.partial(_moved, program, chosen, arrays),
    [arrays[n] for n in chosen],
    [*tangents],
  )
  return [result[1]]


def _moved(program: Program, chosen: Sequence[int], arrays, *moved):
  """A map with other arrays at the places `chosen`."""
  arrays = [*arrays]
  for place, array in zip(chosen, moved):
    arrays[place] = array
  return program(arrays[1:], arrays[0])


def _finite(tokens: jax.Array) -> jax.Array:
  """Zeros for NaN and infinity."""
  is_finite = jnp.abs(tokens.astype(jnp.float32)) < jnp.inf
  return jnp.where(is_finite, tokens, jnp.zeros_like(tokens))


def _tile_program(
  function: Callable, tokens: Any, captured: Sequence[Any]
) -> Program | None:
  """A map of a tile [64, D] of tokens; None for what the kernel lacks."""
  size = tokens.shape[-1]
  is_of_tiles = math.prod(tokens.shape[:-1]) % SIDE == 0 and size in (64, 128)
  if not is_of_tiles or any(each.ndim for each in captured):
    return None
  tile = jax.ShapeDtypeStruct((SIDE, size), tokens.dtype)
  program, own = without_captured(function, tile)
  is_same = len(own) == len(captured) and all(map(_is, own, captured))
  return program if program.jaxpr.eqns and is_same else None


def _is(one: Any, other: Any) -> bool:
  return one is other


def _pull_back(
  program: Program | None,
  arrays: Sequence[jax.Array],
  chosen: Sequence[int],
  is_masked: bool,
) -> RowFunction | None:
  """The transposed map of a tile; None for what the kernel lacks."""
  if program is None:
    return None
  tokens, *captured = arrays
  tile = jax.ShapeDtypeStruct((SIDE, tokens.shape[-1]), tokens.dtype)
  result = jax.eval_shape(program, captured, tile)

  def pull_back(tile, of_result, *numbers):
    values = [_finite(tile) if is_masked else tile, *numbers]
    moved = functools.partial(_moved, program, chosen, values)
    return jax.vjp(moved, *(values[n] for n in chosen))[1](of_result)

  shapes = [jax.ShapeDtypeStruct((), each.dtype) for each in captured]
  try:
    return row_functions.traced(pull_back, [tile, result, *shapes])
  except Unsupported:
    return None


def _transpose(
  pull_back: RowFunction,
  chosen: Sequence[int],
  interpret: Any,
  arrays: Sequence[jax.Array],
  cotangents: Sequence[jax.Array],
) -> list[jax.Array]:
  """The cotangents of tokens and of captured numbers, by a kernel."""
  tokens, *numbers = arrays
  (cotangent,) = cotangents
  count = math.prod(tokens.shape[:-1])
  of_tokens = jax.ShapeDtypeStruct((count, tokens.shape[-1]), tokens.dtype)
  parts = jax.ShapeDtypeStruct((count // SIDE,), jnp.float32)
  results = row_functions.call(
    pull_back,
    [each.reshape(count, each.shape[-1]) for each in (tokens, cotangent)],
    [each.reshape(1) for each in numbers],
    [parts if place else of_tokens for place in chosen],
    interpret,
  )
  return [
    (jnp.sum(each) if place else each)
    .reshape(arrays[place].shape)
    .astype(arrays[place].dtype)
    for place, each in zip(chosen, results)
  ]
