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
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval as partial_evaluation

from attention.implementations.pallas.functions import CALLS, check_supported
from attention.implementations.pallas.hopper_tiles import TILE
from attention.implementations.pallas.operands import (
  Blocks,
  Kind,
  Operand,
  Plan,
  Unsupported,
)
from attention.implementations.pallas.pairwise import Tile, values
from attention.implementations.pallas.tile_functions import parameters
from attention.positional import Pairwise
from attention.scores import Positions, Score
from attention.scores.base import Wrapper

_PARTS = {Kind.SCALAR: (), Kind.ROW: TILE, Kind.COLUMN: TILE}
# Operations between shapes of one number.
_SHAPES = {"broadcast_in_dim", "reshape", "squeeze", "transpose", "copy"}


@dataclasses.dataclass(frozen=True, eq=False)
class PairFunction:
  """A traced function that reads arrays, given as its last arguments."""

  jaxpr: Jaxpr
  operands: Sequence[Operand]
  names: Sequence[str]  # of the operands, as inputs of a kernel

  def __call__(self, *arguments: Any) -> jax.Array:
    """The result [64, 64]."""
    return _spread(_evaluate(self.jaxpr, arguments)[0])

  def pull_back(self, arguments: Sequence[Any], cotangents: Any) -> jax.Array:
    """The cotangents of the first argument, for those of the result."""

    # Traced and evaluated, as kernels lack an operation of `jax.vjp`.
    def of_scores(cotangents, scores, *rest):
      _, pull_back = jax.vjp(lambda scores: self(scores, *rest), scores)
      return pull_back(cotangents)

    closed = jax.make_jaxpr(of_scores)(cotangents, *arguments)
    assert not closed.consts
    return _spread(_evaluate(closed.jaxpr, [cotangents, *arguments])[0])


def of_pairwise(
  name: str, parts: Sequence[Pairwise], rank: int
) -> PairFunction | None:
  """A bias, or the conjunction of masks: (queries, keys, *indices, *parts)."""
  if not parts:
    return None
  plan, one = Plan(), jnp.zeros((1, 1), jnp.int32)
  for each in parts:
    values(each, Tile(plan, one, one, rank))
  _check_kinds(plan.operands)

  def compute(queries, keys, *others):
    at = Tile(Blocks(others[rank:], others[:rank]), queries, keys, rank)
    results = [values(each, at) for each in parts]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, results), TILE)

  arguments = [_INTEGERS, _INTEGERS, *[_INTEGER] * rank]
  return _traced(name, compute, arguments, plan.operands)


def of_wrappers(name: str, score: Score, rank: int) -> PairFunction | None:
  """What wrappers do to scores: (scores, queries, keys, *indices, *parts)."""
  wrappers = [*_wrappers(score)]
  if all(type(each).pair_at is Wrapper.pair_at for each in wrappers):
    return None
  with_parts, operands = parameters(score, rank)

  def compute(scores, queries, keys, *others):
    indices, parts = others[:rank], others[rank:]
    at = _PairPositions(
      *(0, 0, *TILE), key_length=0, leading=indices, queries=queries, keys=keys
    )
    changed = _with_base(with_parts(parts), _Given(scores))
    return jnp.broadcast_to(changed.pair_at(scores, scores, at), TILE)

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


def base(score: Any) -> Any:
  """The score that wrappers change."""
  for wrapper in _wrappers(score):
    score = wrapper.score
  return score


def number_dtype(array: jax.Array) -> Any:
  """That of the numbers which a kernel reads: float32 or int32."""
  is_float = jnp.issubdtype(array.dtype, jnp.floating)
  return jnp.dtype(jnp.float32 if is_float else jnp.int32)


def _wrappers(score: Score):
  while isinstance(score, Wrapper):
    yield score
    score = score.score


def _with_base(score: Score, replacement: Score) -> Score:
  if not isinstance(score, Wrapper):
    return replacement
  inner = _with_base(score.score, replacement)
  return dataclasses.replace(score, score=inner)


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

  def broadcast(self, rank):
    return self.query_start + self.queries, self.key_start + self.keys


_INTEGERS = jax.ShapeDtypeStruct(TILE, jnp.int32)
_INTEGER = jax.ShapeDtypeStruct((), jnp.int32)


def _traced(
  name: str,
  compute: Callable,
  arguments: Sequence[jax.ShapeDtypeStruct],
  operands: Sequence[Operand],
) -> PairFunction:
  """Traces compute(*arguments, *parts of operands), without unused operands."""
  parts = [
    jax.ShapeDtypeStruct(
      _PARTS.get(each.kind, each.core), number_dtype(each.array)
    )
    for each in operands
  ]
  closed = jax.make_jaxpr(compute)(*arguments, *parts)
  first = len(arguments)
  kept = [True] * first + [False] * len(parts)
  # This removes operations on arrays whose parts the kernel reads.
  jaxpr, used = partial_evaluation.dce_jaxpr(
    closed.jaxpr, [True], instantiate=kept
  )
  check_supported(jaxpr, {})
  read = {id(atom) for each in jaxpr.eqns for atom in each.invars}
  if any(id(each) in read for each in jaxpr.constvars):
    raise Unsupported("supports functions of pairs that capture no arrays")
  operands = [each for each, own in zip(operands, used[first:]) if own]
  _check_kinds(operands)
  names = [f"{name} {number}" for number in range(len(operands))]
  function = PairFunction(jaxpr.replace(constvars=[]), operands, names)
  read_parts = [each for each, own in zip(parts, used[first:]) if own]
  jax.eval_shape(function, *arguments, *read_parts)  # raises Unsupported
  return function


def _check_kinds(operands: Sequence[Operand]) -> None:
  if any(each.kind not in _PARTS for each in operands):
    raise Unsupported(
      "supports arrays with a number for each query, each key or each entry of "
      "the leading axes, not for each pair"
    )


def _evaluate(jaxpr: Jaxpr, arguments: Sequence[Any]) -> list[Any]:
  """The results of a jaxpr; arrays of one element are numbers."""
  known: dict[Any, Any] = dict(zip(jaxpr.invars, arguments))

  def read(atom):
    return atom.val if isinstance(atom, Literal) else known[atom]

  for equation in jaxpr.eqns:
    results = _evaluate_one(equation, [*map(read, equation.invars)])
    known.update(zip(equation.outvars, results))
  return [*map(read, jaxpr.outvars)]


def _evaluate_one(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
  name, parameters = equation.primitive.name, equation.params
  if name in CALLS:
    inner = parameters[CALLS[name]]
    if isinstance(inner, ClosedJaxpr):
      if inner.consts:
        raise Unsupported("supports functions of pairs that capture no arrays")
      inner = inner.jaxpr
    return _evaluate(inner, inputs)
  shape = equation.outvars[0].aval.shape
  if shape != TILE and equation.outvars[0].aval.size != 1:
    raise Unsupported(f"computes no arrays of shape {shape} of a pair")
  if name == "add_any":
    return [jax.lax.add(*map(_spread, inputs))]
  if name in _SHAPES and (jnp.size(inputs[0]) == 1 or name == "copy"):
    return [inputs[0]]
  if any(jnp.shape(each) == TILE for each in inputs):
    inputs = [*map(_spread, inputs)]
  else:
    inputs = [
      each if jnp.ndim(each) == 0 else each.reshape(()) for each in inputs
    ]
  return [equation.primitive.bind(*inputs, **parameters)]


def _spread(value: Any) -> jax.Array:
  """The value of all pairs."""
  if jnp.shape(value) == TILE:
    return value
  return jax.lax.broadcast_in_dim(value, TILE, ())
