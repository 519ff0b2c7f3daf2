"""Closures converted to functions of the arrays that they capture."""

import dataclasses
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun
from jax.extend.linear_util import WrappedFun

from attention.transforms.function_pytree import is_of_this_package

# Types of values that are callable and equal by value.
_VALUES = (type, jax.sharding.Mesh, jax.sharding.AbstractMesh)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A traced function (captured, *arguments) -> result, equal by value."""

  # Programs with equal operations are equal, so `jax.jit` with a program as a
  # static argument compiles once for all of them. Custom derivative rules
  # cannot be compared; programs that have some are equal if `owner` is too.

  jaxpr: Jaxpr
  structure: Any
  owner: Any

  def __call__(self, captured: list[jax.Array], *arguments: Any) -> Any:
    """The result, for arrays in place of those that were captured."""
    leaves = jax.tree.leaves(arguments)
    results = jaxpr_as_fun(ClosedJaxpr(self.jaxpr, captured))(*leaves)
    return jax.tree.unflatten(self.structure, results)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Program) and self._value == other._value

  def __hash__(self) -> int:
    return hash(self._value)

  @functools.cached_property
  def _value(self) -> tuple:
    functions: list[Any] = []
    operations = _of_jaxpr(self.jaxpr, functions)
    return operations, self.structure, self.owner if functions else None


def without_captured(
  function: Callable, *arguments: Any, owner: Any = None
) -> tuple[Program, list[Any]]:
  """Returns (captured, *arguments) -> result, and the captured arrays."""
  # A custom derivative rule needs this: it differentiates with respect to
  # arguments only. `arguments` are arrays or `jax.ShapeDtypeStruct`s, and
  # `owner` identifies the function; None if it has no custom derivative rules.
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
  jaxpr: Any = closed.jaxpr
  if jaxpr is closed:  # JAX 0.12, where a jaxpr keeps what it captured
    jaxpr = ClosedJaxpr(closed.jaxpr, [])
  program = Program(jaxpr, jax.tree.structure(shapes), owner)
  return program, list(closed.consts)


def identity(value: Any) -> Any:
  """A hashable stand-in for a score, a mask, a bias or a normalizer."""
  # Numbers are compared by value. Functions, and arrays that a rule may have
  # captured, are compared by identity and not kept alive.
  if value is None or isinstance(value, bool | int | float | str):
    return value
  if isinstance(value, jax.tree_util.Partial):
    return identity((value.func, *value.args, *value.keywords.items()))
  if isinstance(value, tuple):
    return tuple(map(identity, value))
  if isinstance(value, types.MethodType):
    return _Same(value.__self__), value.__func__
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = [getattr(value, each.name) for each in dataclasses.fields(value)]
    if is_of_this_package(type(value)):
      # Rules of this package receive arrays as arguments.
      fields = [None if _is_array(each) else each for each in fields]
    return type(value), *map(identity, fields)
  return _Same(value)


def _is_array(value: Any) -> bool:
  return isinstance(value, jax.Array | np.ndarray)


class _Same:
  """Equal for the same object, which it does not keep alive."""

  def __init__(self, value: Any):
    try:
      self._reference: Callable = weakref.ref(value)
    except TypeError:
      self._reference = lambda: value
    self._hash = id(value)

  def __eq__(self, other: object) -> bool:
    value = self._reference()
    return (
      isinstance(other, _Same)
      and value is not None
      and value is other._reference()
    )

  def __hash__(self) -> int:
    return self._hash


def _of_jaxpr(jaxpr: Jaxpr, functions: list[Any]) -> tuple:
  """The operations of a jaxpr as a tuple; collects their functions."""
  numbers: dict[Any, int] = {}

  def define(variable):
    numbers[variable] = len(numbers)
    return variable.aval

  def use(atom):
    if isinstance(atom, Literal):
      return atom.aval, _of_parameter(atom.val, functions)
    return numbers[atom]

  inputs = [define(each) for each in (*jaxpr.constvars, *jaxpr.invars)]
  equations = [
    (
      equation.primitive,
      tuple(map(use, equation.invars)),
      _of_parameter(equation.params, functions),
      tuple(map(define, equation.outvars)),
    )
    for equation in jaxpr.eqns
  ]
  return tuple(inputs), tuple(equations), tuple(map(use, jaxpr.outvars))


def _of_parameter(value: Any, functions: list[Any]) -> Any:
  """A hashable value of a parameter of an operation."""
  recurse = functools.partial(_of_parameter, functions=functions)
  if isinstance(value, ClosedJaxpr):
    return _of_jaxpr(value.jaxpr, functions), recurse(value.consts)
  if isinstance(value, Jaxpr):
    return _of_jaxpr(value, functions)
  if isinstance(value, dict):
    return tuple((name, recurse(value[name])) for name in sorted(value))
  if isinstance(value, list | tuple):
    return type(value).__name__, *map(recurse, value)
  if isinstance(value, np.ndarray | np.generic):
    return value.shape, str(value.dtype), value.tobytes()
  if isinstance(value, float):
    return repr(value), float  # NaN differs from itself
  is_function = callable(value) and not isinstance(value, _VALUES)
  if is_function or isinstance(value, WrappedFun):
    functions.append(value)
    return None
  try:
    hash(value)
  except TypeError:
    return id(value)  # the program keeps it alive
  return value
