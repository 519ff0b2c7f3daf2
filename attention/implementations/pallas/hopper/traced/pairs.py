"""Functions of the pairs of a tile in the kernels for Hopper GPUs.

They are traced outside of a kernel, which evaluates their operations: one
number for each pair, in the layout of the tensor cores' results, or one number
for the tile.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Var

from attention.implementations.pallas.evaluation import (
  Rules,
  apply_primitive,
  interpret,
)
from attention.implementations.pallas.functions import (
  check_supported,
  without_constants,
  without_unused,
)
from attention.implementations.pallas.hopper.tiles.layout import TILE
from attention.implementations.pallas.hopper.traced.bias_by_distance import (
  Numbers,
  number_at_p,
  numbers_at,
)
from attention.implementations.pallas.hopper.traced.functions import (
  gradient_of,
  inlined,
)
from attention.implementations.pallas.operands import Kind, Operand, Unsupported

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

  @property
  def buckets(self) -> dict[str, np.ndarray]:
    """The bucket of each distance, for operands with numbers of buckets."""
    variables = self.jaxpr.invars[len(self.jaxpr.invars) - len(self.names) :]
    names = dict(zip(variables, self.names))
    found = {}
    for each in self.jaxpr.eqns:
      if each.primitive is number_at_p and each.params["buckets"]:
        numbers = each.invars[0]
        assert isinstance(numbers, Var)
        found[names[numbers]] = np.array(each.params["buckets"])
    return found

  def __call__(self, *arguments: Any) -> list[jax.Array]:
    """The results [64, 64]."""
    return [*map(spread, evaluate(self.jaxpr, arguments))]

  def gradient(
    self,
    arguments: Sequence[Any],
    cotangents: Sequence[jax.Array],
    name: str | None,
  ) -> jax.Array:
    """The cotangents of the first argument, or of an operand, of pairs."""
    place = 0
    if name is not None:
      place = len(arguments) - len(self.names) + self.names.index(name)
    function, arguments = self._looked_up(arguments)
    arguments[place] = spread(arguments[place])
    return gradient_of(function, arguments, cotangents, place)

  def _looked_up(
    self, arguments: Sequence[Any]
  ) -> tuple["PairFunction", list[Any]]:
    """The same function, whose values per relative distance are arguments."""
    jaxpr = self.jaxpr
    others = [x for x in jaxpr.eqns if x.primitive is not number_at_p]
    own = [x for x in jaxpr.eqns if x.primitive is number_at_p]
    if not own:
      return self, [*arguments]
    found = [variable for each in own for variable in each.outvars]
    look_up, _ = without_unused(
      jaxpr.replace(outvars=found), keep=len(jaxpr.invars)
    )
    numbers = evaluate(look_up, arguments)
    jaxpr = jaxpr.replace(eqns=others, invars=[*jaxpr.invars, *found])
    # Arrays that are looked up have no other use.
    known = [0.0 if isinstance(x, Numbers) else x for x in arguments]
    return dataclasses.replace(self, jaxpr=jaxpr), [*known, *numbers]


def number_dtype(array: jax.Array) -> Any:
  """That of the numbers which a kernel reads: float32 or int32."""
  is_float = jnp.issubdtype(array.dtype, jnp.floating)
  return jnp.dtype(jnp.float32 if is_float else jnp.int32)


def traced(
  name: str,
  compute: Callable,
  arguments: Sequence[jax.ShapeDtypeStruct],
  operands: Sequence[Operand],
) -> PairFunction:
  """Traces compute(*arguments, *parts of operands), without unused operands."""
  parts = [*map(_part, operands)]
  closed = inlined(compute, *arguments, *parts, is_differentiated=True)
  first = len(arguments)
  # This removes operations on arrays whose parts the kernel reads.
  operands = [*operands, *map(_captured, closed.consts)]
  jaxpr, used = without_unused(without_constants(closed), keep=first)
  operations = {number_at_p.name: numbers_at}
  check_supported(jaxpr, Rules(operations, is_interpreted=False))
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
    buckets = equation.params["buckets"]
    size = len(buckets) if buckets else equation.invars[0].aval.shape[-1]
    return [numbers_at(numbers, spread(places), size)]
  if any(jnp.shape(each) == TILE for each in inputs):
    inputs = [*map(spread, inputs)]
  else:
    inputs = [
      each if jnp.ndim(each) == 0 else each.reshape(()) for each in inputs
    ]
  return apply_primitive(equation, inputs)


def spread(value: Any) -> jax.Array:
  """The value of all pairs."""
  if jnp.shape(value) == TILE:
    return value
  return jax.lax.broadcast_in_dim(value, TILE, ())
