"""Maps of tokens in the kernels for Hopper GPUs.

Kernels transpose the map of their own tokens before the gradient is stored, and
visit other tokens without a map:

- A norm multiplies each token by a number, its *scale*. Kernels multiply scores
  by the scales instead.
- A product of queries with a matrix is linear. A block maps its own tokens when
  they are loaded. With the transposed product of its own keys, the kernel of
  keys has the same scores.

XLA computes other maps before the kernels.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.implementations.closure import without_captured
from attention.implementations.pallas.functions import without_unused
from attention.implementations.pallas.hopper.terms.score_term import ScoreTerm
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  swizzled,
  tile_memory,
)
from attention.implementations.pallas.hopper.traced import row_functions
from attention.implementations.pallas.hopper.traced.functions import inlined
from attention.implementations.pallas.hopper.traced.row_functions import (
  RowFunction,
)
from attention.implementations.pallas.operands import Kind, Operand, Unsupported
from attention.implementations.pallas.score_parameters import parameters
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
  is_known = isinstance(score, QueryKeyNorm) or not changes_tokens(score)
  return is_known and keeps_nan(score.score)


def changes_tokens(wrapper: Wrapper) -> bool:
  """Whether a wrapper has maps of its own."""
  return _overrides(wrapper, Wrapper)


def _overrides(score: Any, base: type[Score]) -> bool:
  return any(
    getattr(type(score), name) is not getattr(base, name)
    for name in ("map_query", "map_key")
  )


def _finite(tokens: jax.Array) -> jax.Array:
  """Zeros for NaN and infinity."""
  is_finite = jnp.abs(tokens.astype(jnp.float32)) < jnp.inf
  return jnp.where(is_finite, tokens, jnp.zeros_like(tokens))


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMap:
  """A map of tokens [64, D] that a kernel computes."""

  function: Any  # (tile, *arrays) -> [mapped tile]
  # (tile, cotangents, *arrays) -> [cotangents, *parts of those of numbers]
  pull_back: Any
  # (tile, cotangents, *arrays) -> [cotangents of matrices], or None if another
  # kernel computes them
  of_matrices: Any
  # The arrays, by the names of inputs: numbers, then matrices.
  numbers: dict[str, Operand]
  matrices: dict[str, Operand]
  # Whether it multiplies tokens by numbers.
  is_scaling: bool = False

  @property
  def operands(self) -> dict[str, Operand]:
    """The numbers and matrices."""
    return self.numbers | self.matrices


@dataclasses.dataclass(frozen=True, eq=False)
class TokenMaps(ScoreTerm):
  """The maps that kernels compute, by "query" and "key"."""

  def tiles(self, kernel):
    if "unmapped" not in kernel.inputs:
      return {}
    tokens = tile_memory(*kernel.inputs["unmapped"][:2])
    return {kernel.own: tokens, "remainder": tokens} | {
      name: swizzled(kernel.inputs[name].array.shape[-2:], tokens.dtype)
      for name in self.maps[kernel.own].matrices
    }

  def written_over(self, kernel):
    if "unmapped" not in kernel.inputs:
      return super().written_over(kernel)
    return {"context": "unmapped", "tokens": "remainder"}

  def memory(self, kernel):
    """The gradients of mapped tokens."""
    if kernel.own not in self.maps or not kernel.of_gradients:
      return {}
    if "unmapped" in kernel.inputs:
      return {"mapped": tile_memory(*kernel.inputs["unmapped"][:2])}
    features = kernel.inputs[kernel.own].array.shape[-1]
    return {"mapped": swizzled((SIDE, features), jnp.float32)}


def _of_maps(maps: Mapping[str, TokenMap]) -> TokenMaps:
  """These maps; that of keys has no arrays of its own."""
  if (of_queries := maps.get("query")) is None:
    return TokenMaps(maps=maps)
  return TokenMaps(
    maps=maps,
    differentiable=of_queries.operands,
    unread_by_keys=of_queries.operands if of_queries.is_scaling else (),
    own_numbers=("query scale",) if of_queries.is_scaling else (),
    matrix_tile=next(iter(of_queries.matrices), TokenMaps.matrix_tile),
  )


def inside(request: Request) -> TokenMaps | None:
  """The maps that kernels compute; None if XLA does."""
  dtypes = {each.dtype for each in request.tokens}
  is_half = request.query.dtype.itemsize == 2
  if not keeps_nan(request.score) or len(dtypes) > 1 or not is_half:
    return None
  try:
    maps = {name: _traced(name, request) for name in ("query", "key")}
  except Unsupported:
    return None
  found = {name: each for name, each in maps.items() if each is not None}
  if all(each.is_scaling for each in found.values()):
    return _of_maps(found) if found else None
  shared = [x.shape[:-2] != request.leading for x in request.tokens[1:]]
  # The float32 sums of shared keys or values do not fit into a block's memory.
  is_large = any(shared) and request.key.shape[-1] > SIDE
  if "key" in found or is_large or not _is_linear(found["query"]):
    return None
  return _of_maps(found | {"key": _transposed(found["query"])})


def _is_linear(own_map: TokenMap) -> bool:
  """Whether the transpose of its derivative depends on no tile."""
  # No map that keeps NaN adds a constant.
  jaxpr = own_map.pull_back.jaxpr
  of_tokens = jaxpr.replace(outvars=jaxpr.outvars[:1])
  _, is_used = without_unused(of_tokens, keep=0)
  return not is_used[0]


def _transposed(own_map: TokenMap) -> TokenMap:
  """The map of keys that gives the same scores as a linear one of queries."""

  def function(tile, *arrays, **options):
    return own_map.pull_back(tile, tile, *arrays, **options)[:1]

  def pull_back(tile, cotangents, *arrays, **options):
    del tile
    return own_map.function(cotangents, *arrays, **options)

  arrays = own_map.numbers, own_map.matrices
  return TokenMap(function, pull_back, None, *arrays)


def _traced(name: str, request: Request) -> TokenMap | None:
  """The map of a tile; None if it changes nothing."""
  tokens = getattr(request, name)
  tile = jax.ShapeDtypeStruct((SIDE, tokens.shape[-1]), tokens.dtype)
  function, operands = _of_one_head(name, request, tile)
  function, operands = _of_used(function, operands, tile)
  parts = [_part(each) for each in operands]
  closed = inlined(function, tile, *parts)
  if not without_unused(closed.jaxpr, keep=1)[0].eqns:
    return None
  _check(name, tile, parts)
  # The float32 sums of a shared query do not fit into a block's memory too.
  is_shared = tokens.shape[:-2] != request.leading
  is_large = isinstance(request.score, Wrapper) and tile.shape[1] > SIDE
  if is_shared and is_large and any(each.shape for each in parts):
    raise Unsupported("has maps of queries that each head has of its own")
  mapped = jax.eval_shape(function, tile, *parts)
  if mapped.shape != tile.shape:
    raise Unsupported("has maps of tokens that keep the number of features")

  def pull_back(tile, cotangents, *arrays):
    tile = _finite(tile) if request.is_masked else tile
    return jax.vjp(function, tile, *arrays)[1](cotangents)

  of_names = {f"{name} map {n}": each for n, each in enumerate(operands)}
  numbers = {own: x for own, x in of_names.items() if x.kind is Kind.SCALAR}
  matrices = {own: x for own, x in of_names.items() if own not in numbers}
  trace = functools.partial(row_functions.traced, num_matrices=len(matrices))
  last = 1 + len(numbers)
  of_tile = trace(lambda *x: [function(*x)], [tile, *parts])
  return TokenMap(
    of_tile,
    trace(lambda *x: pull_back(*x)[:last], [tile, mapped, *parts]),
    trace(lambda *x: pull_back(*x)[last:], [tile, mapped, *parts]),
    numbers,
    matrices,
    _is_scaling(of_tile, tile, parts),
  )


def _is_scaling(function: RowFunction, tile: Any, parts: Sequence[Any]) -> bool:
  """Whether kernels multiply scores by the numbers of a map."""
  # Products of scores and scales may exceed the range of float16.
  if tile.dtype == jnp.float16 or any(each.shape for each in parts):
    return False
  try:
    jax.eval_shape(function.scale, tile, *parts)
  except Unsupported:
    return False
  return True


def _of_one_head(
  name: str, request: Request, tile: Any
) -> tuple[Callable, list[Operand]]:
  """A map (tile, *arrays), with all arrays of the score."""
  of_head, operands = parameters(request.score, len(request.leading))

  def function(tile, *arrays):
    return getattr(of_head(arrays), f"map_{name}")(tile)

  program, captured = without_captured(function, tile, *map(_part, operands))
  first = len(operands)
  operands += [
    Operand(
      jnp.asarray(each), Kind.WHOLE if jnp.ndim(each) else Kind.SCALAR, ()
    )
    for each in captured
  ]

  def of_arrays(tile, *arrays):
    return program([*arrays[first:]], tile, *arrays[:first])

  return of_arrays, operands


def _of_used(
  function: Callable, operands: Sequence[Operand], tile: Any
) -> tuple[Callable, list[Operand]]:
  """A map of the arrays that it uses, numbers before matrices."""
  parts = [_part(each) for each in operands]
  closed = inlined(function, tile, *parts)
  _, (_, *is_used) = without_unused(closed.jaxpr, keep=1)
  places = [place for place, each in enumerate(is_used) if each]
  places.sort(key=lambda place: len(parts[place].shape))

  def of_used(tile, *arrays):
    filled = [jnp.zeros(each.shape, each.dtype) for each in parts]
    for place, array in zip(places, arrays):
      filled[place] = array
    return function(tile, *filled)

  return of_used, [operands[place] for place in places]


def _part(operand: Operand) -> jax.ShapeDtypeStruct:
  """The array of one head."""
  return jax.ShapeDtypeStruct(operand.core, operand.array.dtype)


def _check(name: str, tile: Any, arrays: Sequence[Any]) -> None:
  """Raises `Unsupported` unless the kernels map such tokens."""
  # Only the kernel of queries returns gradients of arrays.
  if name == "key" and arrays:
    raise Unsupported("has maps of keys without arrays")
  matrices = [each for each in arrays if each.shape]
  if any(len(each.shape) != 2 for each in matrices):
    raise Unsupported("has maps with numbers and matrices")
  # Registers hold the rows of a matrix, and a whole token, in this way.
  if tile.shape[1] > 128 or any(
    size not in (64, 128) for each in matrices for size in each.shape
  ):
    raise Unsupported(
      "has maps of tokens of at most 128 features, with matrices of 64 or 128"
    )
  is_wide = any(each.dtype.itemsize > 2 for each in matrices)
  if (
    is_wide and tile.dtype == jnp.float16
  ):  # float16 has a smaller exponent range
    raise Unsupported("has maps with matrices of float16")
