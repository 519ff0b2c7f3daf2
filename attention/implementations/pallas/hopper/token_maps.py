"""Maps of tokens before the kernels for Hopper GPUs, and their derivatives.

XLA computes a map, a product or a norm, in one kernel, but the transpose of a
norm in several. A kernel that Pallas compiles by Triton computes that at once.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from attention.custom_transpose import with_kernel_as_transpose
from attention.implementations.closure import (
  Program,
  without_captured,
)
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

_ROWS = 64  # of a block of the kernel
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
    transpose = None
    if of_tile is not None:
      transpose = functools.partial(
        _transpose, of_tile, chosen, is_masked, interpret
      )
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
  """A map of tokens [64, D] that the kernel transposes; None without one."""
  size = tokens.shape[-1]
  count = math.prod(tokens.shape[:-1])
  # Triton's arrays have powers of 2 as sizes.
  if size & (size - 1) or count % _ROWS or any(x.ndim for x in captured):
    return None
  tile = jax.ShapeDtypeStruct((_ROWS, size), tokens.dtype)
  program, own = without_captured(function, tile)
  is_same = len(own) == len(captured) and all(map(_is, own, captured))
  names = {each.primitive.name for each in program.jaxpr.eqns}
  if not names or not is_same or "dot_general" in names:
    return None
  return program


def _is(one: Any, other: Any) -> bool:
  return one is other


def _transpose(
  program: Program,
  chosen: Sequence[int],
  is_masked: bool,
  interpret: Any,
  arrays: Sequence[jax.Array],
  cotangents: Sequence[jax.Array],
) -> list[jax.Array]:
  """The cotangents of tokens and of captured numbers, by a kernel."""
  tokens, *numbers = arrays
  (cotangent,) = cotangents
  size = tokens.shape[-1]
  count = math.prod(tokens.shape[:-1]) // _ROWS
  rows = pl.BlockSpec((_ROWS, size), lambda n: (n, 0))
  number = pl.BlockSpec((1,), lambda n: (0,))
  part = pl.BlockSpec((1,), lambda n: (n,))

  def transpose(*refs):
    tile, of_result, *others = (ref[...] for ref in refs[: 2 + len(numbers)])
    tile = _finite(tile) if is_masked else tile
    values = [tile, *(x.reshape(y.shape) for x, y in zip(others, numbers))]
    moved = functools.partial(_moved, program, chosen, values)
    pull_back = jax.vjp(moved, *(values[n] for n in chosen))[1]
    for ref, each in zip(refs[2 + len(numbers) :], pull_back(of_result)):
      ref[...] = each.reshape(ref.shape).astype(ref.dtype)

  shapes = {0: jax.ShapeDtypeStruct((count * _ROWS, size), tokens.dtype)}
  results = pl.pallas_call(
    transpose,
    grid=(count,),
    in_specs=[rows, rows, *[number] * len(numbers)],
    out_specs=[part if n else rows for n in chosen],
    out_shape=[
      shapes.get(n, jax.ShapeDtypeStruct((count,), arrays[n].dtype))
      for n in chosen
    ],
    compiler_params=triton.CompilerParams(num_warps=4),
    interpret=bool(interpret),
  )(
    tokens.reshape(-1, size),
    cotangent.reshape(-1, size),
    *(each.reshape(1) for each in numbers),
  )
  return [
    (jnp.sum(each) if place else each).reshape(arrays[place].shape)
    for place, each in zip(chosen, results)
  ]
