"""Functions of the pairs of a tile in the kernels for Hopper GPUs.

Masks, biases, and what wrappers do to a score are traced outside of a kernel,
which evaluates their operations: one number for each pair, in the layout of
the tensor cores' results, or one number for the tile.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var

from attention.implementations.pallas.dropout import Place, factors, words_of
from attention.implementations.pallas.functions import (
  Rules,
  apply_primitive,
  check_supported,
  interpret,
)
from attention.implementations.pallas.hopper.bias_by_distance import (
  PairTile,
  number_at_p,
  numbers_at,
)
from attention.implementations.pallas.hopper.tiles import TILE
from attention.implementations.pallas.hopper.tracing import (
  gradient_of,
  inlined,
  without_unused,
)
from attention.implementations.pallas.hopper.wrapped import with_base, wrappers
from attention.implementations.pallas.operands import (
  Blocks,
  Kind,
  Operand,
  Plan,
  Unsupported,
)
from attention.implementations.pallas.pairwise import values
from attention.implementations.pallas.tile_functions import (
  ByPosition,
  parameters,
  parts_by_position,
)
from attention.positional import Pairwise
from attention.request import Request
from attention.scores import Positions, Score
from attention.scores.base import Wrapper

_PARTS = {Kind.SCALAR: ()} | dict.fromkeys(
  [Kind.ROW, Kind.COLUMN, Kind.TILE], TILE
)
# Operations between shapes of one number.
_SHAPES = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "copy"}


@dataclasses.dataclass(frozen=True, eq=False)
class PairFunction:
  """A traced function that reads arrays, given as its last arguments.

  It has one result, or two: the scores of numerators and of denominators.
  """

  jaxpr: Jaxpr
  operands: Sequence[Operand]
  names: Sequence[str]  # of the operands, as inputs of a kernel

  @property
  def num_results(self) -> int:
    """1, or 2 with the scores of denominators."""
    return len(self.jaxpr.outvars)

  def __call__(self, *arguments: Any) -> list[jax.Array]:
    """The results [64, 64]."""
    return [*map(_spread, evaluate(self.jaxpr, arguments))]

  def gradient(
    self,
    arguments: Sequence[Any],
    cotangents: Sequence[jax.Array],
    name: str | None,
  ) -> jax.Array:
    """The cotangents of the first argument, or of an operand, of pairs."""
    arguments = [*arguments]
    place = 0
    if name is not None:
      place = len(arguments) - len(self.names) + self.names.index(name)
      arguments[place] = _spread(arguments[place])
    return gradient_of(self, arguments, cotangents, place)


def of_pairwise(
  name: str, parts: Sequence[Pairwise], rank: int
) -> PairFunction | None:
  """A bias, or the conjunction of masks: (queries, keys, *indices, *parts)."""
  if not parts:
    return None
  plan, one = Plan(), jnp.zeros((1, 1), jnp.int32)
  for each in parts:
    values(each, PairTile(plan, one, one, rank))

  def compute(queries, keys, *others):
    at = PairTile(Blocks(others[rank:]), queries, keys, rank)
    results = [values(each, at) for each in parts]
    return [jnp.broadcast_to(functools.reduce(jnp.logical_and, results), TILE)]

  arguments = [_INTEGERS, _INTEGERS, *[_INTEGER] * rank]
  return _traced(name, compute, arguments, plan.operands)


def of_dropout(name: str, request: Request) -> PairFunction | None:
  """The factors of weights: (queries, keys, *indices, *parts)."""
  dropout, leading = request.dropout, request.leading
  if dropout is None:
    return None
  words = words_of(dropout)
  shape = (*leading, *request.scores_shape[-2:])
  plan, one = Plan(), jnp.zeros((1, 1), jnp.int32)
  factors(dropout, Place(plan, one, one, 0, shape, words))

  def compute(queries, keys, *others):
    number = 0
    for index, size in zip(others, leading):
      number = number * size + index
    source = Blocks(others[len(leading) :])
    place = Place(source, queries, keys, number, shape, words)
    return [factors(dropout, place)]

  arguments = [_INTEGERS, _INTEGERS, *[_INTEGER] * len(leading)]
  return _traced(name, compute, arguments, plan.operands)


def of_wrappers(
  name: str, score: Score, rank: int, finish: Callable | None = None
) -> PairFunction | None:
  """What `finish` and then wrappers do to sums or products of pairs.

  A function of (scores, queries, keys, *indices, *parts).
  """
  own = [*wrappers(score)]
  if finish is None and all(
    type(each).pair_at is Wrapper.pair_at for each in own
  ):
    return None
  with_parts, operands = parameters(score, rank)

  def compute(scores, queries, keys, *others):
    indices, parts = others[:rank], others[rank:]
    at = _PairPositions(
      *(0, 0, *TILE), key_length=0, leading=indices, queries=queries, keys=keys
    )
    scores = scores if finish is None else _spread(finish(scores))
    changed = with_base(with_parts(parts), _Given(scores))
    both = changed, changed.denominator
    return [
      jnp.broadcast_to(each.pair_at(scores, scores, at), TILE)
      for each in both
      if each is not None
    ]

  floats = jax.ShapeDtypeStruct(TILE, jnp.float32)
  arguments = [floats, _INTEGERS, _INTEGERS, *[_INTEGER] * rank]
  try:
    return _traced(name, compute, arguments, operands)
  except (AssertionError, RuntimeError, TypeError, ValueError) as error:
    if isinstance(error, Unsupported):
      raise
    raise Unsupported(
      "supports wrappers that change each score of a head by itself"
    ) from error


def number_dtype(array: jax.Array) -> Any:
  """That of the numbers which a kernel reads: float32 or int32."""
  is_float = jnp.issubdtype(array.dtype, jnp.floating)
  return jnp.dtype(jnp.float32 if is_float else jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class _Given(Score):
  """Scores that are known."""

  scores: jax.Array

  def pair_at(self, query, key, positions):
    return self.scores


@dataclasses.dataclass(frozen=True, eq=False)
class _PairPositions(Positions):
  """The positions of all pairs of a tile, relative to the starts."""

  queries: jax.Array = dataclasses.field(kw_only=True)
  keys: jax.Array = dataclasses.field(kw_only=True)

  @property
  def query(self):
    raise Unsupported("supports functions of the positions of pairs only")

  key = query

  def at_queries(self, numbers):
    return self._parts(numbers).of_queries

  def at_keys(self, numbers):
    return self._parts(numbers).of_keys

  def _parts(self, numbers) -> ByPosition:
    is_shifted = any(map(_is_shift, (self.query_start, self.key_start)))
    return parts_by_position(numbers, is_shifted=is_shifted)

  def broadcast(self, rank):
    return self.query_start + self.queries, self.key_start + self.keys


def _is_shift(start: Any) -> bool:
  return not isinstance(start, int) or start != 0


_INTEGERS = jax.ShapeDtypeStruct(TILE, jnp.int32)
_INTEGER = jax.ShapeDtypeStruct((), jnp.int32)


def _traced(
  name: str,
  compute: Callable,
  arguments: Sequence[jax.ShapeDtypeStruct],
  operands: Sequence[Operand],
) -> PairFunction:
  """Traces compute(*arguments, *parts of operands), without unused operands."""
  parts = [*map(_part, operands)]
  closed = inlined(compute, *arguments, *parts)
  first = len(arguments)
  # This removes operations on arrays whose parts the kernel reads.
  operands = [*operands, *map(_captured, closed.consts)]
  jaxpr = closed.jaxpr
  jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])
  jaxpr, used = without_unused(jaxpr, keep=first)
  replacements = {number_at_p.name: numbers_at}
  check_supported(jaxpr, Rules(replacements, is_interpreted=False))
  operands = [each for each, own in zip(operands, used[first:]) if own]
  _check_kinds(jaxpr, operands)
  names = [f"{name} {number}" for number in range(len(operands))]
  function = PairFunction(jaxpr, operands, names)
  read_parts = [_part(each) for each in operands]
  jax.eval_shape(function, *arguments, *read_parts)  # raises Unsupported
  return function


def _part(operand: Operand) -> jax.ShapeDtypeStruct:
  """What a function reads of an array."""
  shape = _PARTS.get(operand.kind, operand.core)
  return jax.ShapeDtypeStruct(shape, number_dtype(operand.array))


def _captured(array: Any) -> Operand:
  """An array that a function captured, with all of its axes."""
  array = jnp.asarray(array)
  if array.size == 1:  # the array itself, if it is a number
    number = array.reshape(()) if array.ndim else array
    return Operand(number, Kind.SCALAR, ())
  return Operand(array, Kind.WHOLE, ())


def _check_kinds(jaxpr: Jaxpr, operands: Sequence[Operand]) -> None:
  """Raises `Unsupported` for arrays that are not looked up by distance."""
  first = len(jaxpr.invars) - len(operands)
  arrays = {
    variable
    for variable, each in zip(jaxpr.invars[first:], operands)
    if each.kind not in _PARTS
  }
  users = [x for x in jaxpr.eqns if x.primitive is not number_at_p]
  if any(type(x) is Var and x in arrays for user in users for x in user.invars):
    raise Unsupported(
      "supports arrays with a number for each query, each key, each pair or "
      "each entry of the leading axes"
    )


def evaluate(jaxpr: Jaxpr, arguments: Sequence[Any]) -> list[Any]:
  """The results of a jaxpr; arrays of one element are numbers."""
  return interpret(jaxpr, [], arguments, _apply)


def _apply(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
  name = equation.primitive.name
  shape = equation.outvars[0].aval.shape
  if shape != TILE and equation.outvars[0].aval.size != 1:
    raise Unsupported(f"computes no arrays of shape {shape} of a pair")
  if name in _SHAPES and (equation.invars[0].aval.size == 1 or name == "copy"):
    return inputs[:1]
  if equation.primitive is number_at_p:
    numbers, places = inputs
    size = equation.invars[0].aval.shape[-1]
    return [numbers_at(numbers, _spread(places), size)]
  if name == "add_any":  # which kernels lack
    return [jax.lax.add(*map(_spread, inputs))]
  if any(jnp.shape(each) == TILE for each in inputs):
    inputs = [*map(_spread, inputs)]
  else:
    inputs = [
      each if jnp.ndim(each) == 0 else each.reshape(()) for each in inputs
    ]
  return apply_primitive(equation, inputs)


def _spread(value: Any) -> jax.Array:
  """The value of all pairs."""
  if jnp.shape(value) == TILE:
    return value
  return jax.lax.broadcast_in_dim(value, TILE, ())
