"""Maps of tokens in the kernels for Hopper GPUs, or before them.

A norm is computed in the kernels: that of a block's own tokens when they are
loaded, and its transpose before their gradient is stored. XLA computes the maps
of the other tokens that a block visits, and products with matrices.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from attention.implementations.closure import (
  Program,
  without_captured,
)
from attention.implementations.pallas.hopper import row_functions
from attention.implementations.pallas.hopper.row_functions import RowFunction
from attention.implementations.pallas.hopper.tiles import SIDE
from attention.implementations.pallas.operands import (
  Kind,
  Operand,
  Unsupported,
)
from attention.request import Request
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
) -> jax.Array:
  """function(tokens), which keeps NaN.

  If keys may be hidden, derivatives are those at finite tokens.
  """
  program, captured = without_captured(function, tokens)

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
    if is_masked:
      arrays = [_finite(arrays[0]), *arrays[1:]]
    of_chosen = functools.partial(_moved, program, chosen, arrays)
    primals = [arrays[n] for n in chosen]
    return result, jax.jvp(of_chosen, primals, [moved[n] for n in chosen])[1]

  return compute([tokens, *captured])


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


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMap:
  """A map of tokens [64, D] that a kernel computes."""

  function: RowFunction  # (tile, *numbers) -> [mapped tile]
  # (tile, cotangents, *numbers) -> [cotangents, *parts of those of numbers]
  pull_back: RowFunction
  operands: dict[str, Operand]  # numbers, by the names of inputs


def inside(request: Request) -> dict[str, TokenMap]:
  """The maps that kernels compute, by "query" and "key"; none if XLA does."""
  score, tokens = request.score, request.tokens
  dtypes = {each.dtype for each in tokens}
  if not keeps_nan(score) or len(dtypes) > 1 or tokens[0].dtype.itemsize != 2:
    return {}
  maps = {
    "query": (score.map_query, request.query),
    "key": (score.map_key, request.key),
  }
  found = {}
  try:
    for name, (function, array) in maps.items():
      traced = _traced(name, function, array, request.is_masked)
      if traced is not None:
        found[name] = traced
  except Unsupported:
    return {}
  return found


def _traced(
  name: str, function: Callable, tokens: jax.Array, is_masked: bool
) -> TokenMap | None:
  """The map of a tile; None if it changes nothing."""
  size = tokens.shape[-1]
  tile = jax.ShapeDtypeStruct((SIDE, size), tokens.dtype)
  program, captured = without_captured(function, tile)
  if not program.jaxpr.eqns:
    return None
  # Only the kernel of queries returns gradients of numbers.
  if any(map(jnp.ndim, captured)) or (name == "key" and captured):
    raise Unsupported(
      "has maps of tokens with captured numbers of queries only"
    )
  if size not in (64, 128):
    raise Unsupported("has maps of tokens of 64 or 128 features")

  def map_tile(tile, *numbers):
    return program([*numbers], tile)

  def pull_back(tile, cotangents, *numbers):
    tile = _finite(tile) if is_masked else tile
    return jax.vjp(map_tile, tile, *numbers)[1](cotangents)

  numbers = [jax.ShapeDtypeStruct((), jnp.asarray(x).dtype) for x in captured]
  mapped = jax.eval_shape(map_tile, tile, *numbers)
  if mapped.shape != tile.shape:
    raise Unsupported("has maps of tokens that keep the number of features")
  return TokenMap(
    row_functions.traced(map_tile, [tile, *numbers]),
    row_functions.traced(pull_back, [tile, mapped, *numbers]),
    {
      f"{name} map {number}": Operand(jnp.asarray(each), Kind.SCALAR, ())
      for number, each in enumerate(captured)
    },
  )
