"""Traced functions of the kernels for Hopper GPUs, and their gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from attention.implementations.pallas.derivative_rules import (
  has_rule,
  is_of_jax,
)
from attention.implementations.pallas.evaluation import (
  apply_primitive,
  called,
  interpret,
)
from attention.implementations.pallas.functions import dtypes_of_kernels
from attention.implementations.pallas.operands import Unsupported


def gradient_of(
  function: Callable, arguments: Sequence[Any], cotangents: Any, place: int = 0
) -> jax.Array:
  """The cotangent of one argument of a function in a kernel.

  The cotangents have the structure of the function's results.
  """

  # Traced and evaluated, as kernels lack an operation of `jax.vjp`.
  def gradient(cotangents, *arguments):
    def of_one(argument):
      return function(*arguments[:place], argument, *arguments[place + 1 :])

    return jax.vjp(of_one, arguments[place])[1](cotangents)

  closed = inlined(gradient, cotangents, *arguments)
  arguments = [*jax.tree.leaves(cotangents), *arguments]
  return interpret(closed.jaxpr, closed.consts, arguments, apply_primitive)[0]


def inlined(
  function: Callable, *arguments: Any, is_differentiated: bool = False
) -> ClosedJaxpr:
  """Traces a function, and the functions that it calls, as one jaxpr.

  If the jaxpr `is_differentiated`, a function with another derivative than
  that of its operations raises `Unsupported`.
  """

  def apply(equation, inputs):
    if (inner := called(equation)) is not None:
      if is_differentiated and has_rule(equation):
        inputs = _with_derivatives_of_rule(equation, inputs)
      return interpret(*inner, inputs, apply)
    if _changes_nothing(equation):
      return inputs[:1]
    return apply_primitive(equation, inputs)

  with dtypes_of_kernels(interpret=False):
    closed = jax.make_jaxpr(function)(*arguments)
    leaves = jax.tree.leaves(arguments)
    return jax.make_jaxpr(
      lambda *leaves: interpret(closed.jaxpr, closed.consts, leaves, apply)
    )(*leaves)


def _with_derivatives_of_rule(
  equation: Any, inputs: Sequence[Any]
) -> Sequence[Any]:
  """Inputs with which the operations have the derivatives of the rule."""
  name = equation.params["call_jaxpr"].jaxpr.debug_info.func_name
  if is_of_jax(equation) and name == "relu":
    (number,) = inputs
    zeros = jax.lax.full_like(number, 0)
    # Zeros without derivatives: those of a maximum of equal numbers are half.
    return [jax.lax.select(jax.lax.le(number, zeros), zeros, number)]
  if is_of_jax(equation) and name == "logaddexp":
    return inputs
  raise Unsupported(
    f"supports no function with a derivative rule of its own, such as {name}"
  )


def _changes_nothing(equation: Any) -> bool:
  """Whether a reshape, as transposition adds, has the shape of its input."""
  # On a mesh it has a sharding, which kernels for GPUs lack.
  if equation.primitive.name != "reshape":
    return False
  before, after = equation.invars[0].aval, equation.outvars[0].aval
  return before.shape == after.shape


def without_stops(closed: ClosedJaxpr) -> ClosedJaxpr:
  """A jaxpr that is not differentiated, without `stop_gradient`."""

  # Kernels for GPUs lack it.
  def apply(equation, inputs):
    if equation.primitive.name == "stop_gradient":
      return inputs
    return apply_primitive(equation, inputs)

  return jax.make_jaxpr(
    lambda *arguments: interpret(closed.jaxpr, closed.consts, arguments, apply)
  )(*closed.in_avals)
