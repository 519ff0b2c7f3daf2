"""Functions with a derivative rule of their own, inside of a kernel.

Kernels evaluate the operations of a traced function and differentiate these.
Without this module they would ignore the rules of `jax.custom_jvp`, which a
function of the user or of JAX may have, for instance `jax.nn.relu`. Those of
this package agree with their operations.
"""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from attention.implementations.pallas.operands import Unsupported

_PACKAGE = str(pathlib.Path(__file__).parents[2])
_JAX = str(pathlib.Path(jax.__file__).parent)
# (jaxpr, captured, arguments) -> results
Evaluate = Callable[[Jaxpr, Sequence[Any], Sequence[Any]], list[Any]]


def has_rule(equation: Any) -> bool:
  """Whether an operation calls a function with a rule of its own.

  Raises `Unsupported` for rules of `jax.custom_vjp`.
  """
  name = equation.primitive.name
  if name not in ("custom_jvp_call", "custom_vjp_call"):
    return False
  if _file_of(equation).startswith(_PACKAGE):
    return False
  if name == "custom_vjp_call":
    raise Unsupported("supports no function with a rule of jax.custom_vjp")
  return True


def is_of_jax(equation: Any) -> bool:
  """Whether the called function is one of JAX."""
  return _file_of(equation).startswith(_JAX)


def _file_of(equation: Any) -> str:
  """The file of the called function, or ""."""
  debug_info = equation.params["call_jaxpr"].jaxpr.debug_info
  return debug_info.func_filename or ""


def rule_of(equation: Any) -> tuple[ClosedJaxpr, list[bool]]:
  """The rule (primals, tangents) -> (results, tangents), and which are zero.

  Its tangents are those of numbers with a point.
  """
  inputs = equation.invars[equation.params["num_consts"] :]
  jaxpr, captured, zeros = equation.params["jvp_jaxpr_fun"].call_wrapped(
    *[not jnp.issubdtype(each.aval.dtype, jnp.floating) for each in inputs]
  )
  return ClosedJaxpr(jaxpr, captured), [*zeros]


def with_rule(
  equation: Any, inputs: Sequence[Any], evaluate: Evaluate
) -> list[Any]:
  """The results of a called function, whose derivatives are by its rule."""
  inner = equation.params["call_jaxpr"]
  count = equation.params["num_consts"]

  @jax.custom_jvp
  def function(inputs):
    return evaluate(inner.jaxpr, inner.consts, inputs)

  @function.defjvp
  def _(primals, tangents):
    rule, zeros = rule_of(equation)
    (primals,), (tangents,) = primals, tangents
    tangents = [
      tangent
      for tangent in tangents[count:]
      if jnp.issubdtype(tangent.dtype, jnp.floating)
    ]
    results = evaluate(rule.jaxpr, rule.consts, [*primals[count:], *tangents])
    outputs, others = results[: len(zeros)], iter(results[len(zeros) :])
    return outputs, [
      jnp.zeros_like(output) if is_zero else next(others)
      for output, is_zero in zip(outputs, zeros)
    ]

  return function([*inputs])
