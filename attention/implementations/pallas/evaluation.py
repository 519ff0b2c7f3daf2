"""Evaluates traced operations in a kernel, with replacements.

Numbers of 16 bits are computed in float32, except for the factors of matrix
products, and the additive score has a loop over channels.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from attention.arrays import axes
from attention.implementations.pallas.derivative_rules import (
  has_rule,
  with_rule,
)
from attention.implementations.pallas.products import (
  kernel_precision,
  matrix_product,
  wide,
)
from attention.scores import additive_kernel

# Operations that call a jaxpr, and the parameter that has it.
_CALLS = {
  "jit": "jaxpr",
  "pjit": "jaxpr",
  "closed_call": "call_jaxpr",
  "checkpoint": "jaxpr",
  "remat2": "jaxpr",
  "custom_jvp_call": "call_jaxpr",
  "custom_vjp_call": "call_jaxpr",
}
# Between devices of a mesh: within a kernel they change nothing.
_UNCHANGED = frozenset(["pvary", "reshard"])


class Rules(NamedTuple):
  """How a kernel evaluates traced operations."""

  operations: Mapping[str, Callable[..., jax.Array]]  # by a primitive's name
  is_interpreted: bool  # whether XLA's CPU backend computes the kernel
  # The additive score in a kernel; None evaluates its operations.
  weighted_tanh_sum: Callable[..., jax.Array] | None = None


def interpret(
  jaxpr: Jaxpr,
  captured: Sequence[Any],
  arguments: Sequence[Any],
  apply: Callable,
) -> list[Any]:
  """The results of a jaxpr, whose operations are apply(equation, inputs)."""
  values: dict[Any, Any] = dict(
    zip((*jaxpr.constvars, *jaxpr.invars), (*captured, *arguments))
  )

  def read(atom):
    return atom.val if isinstance(atom, Literal) else values[atom]

  for equation in jaxpr.eqns:
    inputs = [*map(read, equation.invars)]
    is_unchanged = equation.primitive.name in _UNCHANGED
    results = inputs if is_unchanged else apply(equation, inputs)
    values.update(zip(equation.outvars, results))
  return [*map(read, jaxpr.outvars)]


def apply_primitive(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
  """The results of an operation, as JAX computes them."""
  power = equation.params.get("y", 0)
  if equation.primitive.name == "add_any":  # which kernels lack
    return [jax.lax.add(*inputs)]
  if equation.primitive.name == "one_minus_square":  # of tanh, in JAX 0.12
    return [1.0 - inputs[0] * inputs[0]]
  if equation.primitive.name == "integer_pow" and power < -1:
    # Kernels for GPUs have no such powers.
    return [1.0 / jax.lax.integer_pow(inputs[0], -power)]
  results = equation.primitive.bind(*inputs, **equation.params)
  return results if equation.primitive.multiple_results else [results]


def called(equation: Any) -> tuple[Jaxpr, Sequence[Any]] | None:
  """The jaxpr that an operation calls, and its constants."""
  if equation.primitive.name not in _CALLS:
    return None
  inner = equation.params[_CALLS[equation.primitive.name]]
  if isinstance(inner, ClosedJaxpr):
    return inner.jaxpr, inner.consts
  return inner, []


def evaluate_jaxpr(
  jaxpr: Jaxpr, captured: Sequence[Any], arguments: Sequence[Any], rules: Rules
) -> list[Any]:
  """The results of a jaxpr, with the replacements of this module."""
  results = interpret(
    jaxpr,
    [*map(_widened, captured)],
    [*map(_widened, arguments)],
    lambda equation, inputs: _evaluate_one(equation, inputs, rules),
  )
  return [*map(_widened, results)]


def _evaluate_one(equation, inputs, rules) -> Sequence[Any]:
  name, parameters = equation.primitive.name, equation.params
  if (inner := called(equation)) is not None:
    replacement = replacement_of(inner[0], rules)
    if replacement is not None:
      return [replacement(*inputs)]
    evaluate = functools.partial(evaluate_jaxpr, rules=rules)
    if has_rule(equation):
      return with_rule(equation, inputs, evaluate)
    return evaluate(*inner, inputs)
  if name in rules.operations:
    inputs = [*map(_widened, inputs)]
    return [rules.operations[name](*inputs, **parameters)]
  if name == "dot_general":
    dtypes = [each.aval.dtype for each in equation.invars]
    return [_product(inputs, dtypes, parameters, rules.is_interpreted)]
  if name in ("convert_element_type", "iota"):
    dtype = wide(parameters.get("new_dtype", parameters.get("dtype")))
    if name == "convert_element_type":
      return [jax.lax.convert_element_type(inputs[0], dtype)]
    parameters = {**parameters, "dtype": dtype}
  inputs = axes.varying_alike([*map(_widened, inputs)])
  results = equation.primitive.bind(*inputs, **parameters)
  return results if equation.primitive.multiple_results else [results]


def _product(inputs, dtypes, parameters, is_interpreted: bool) -> jax.Array:
  """A matrix product of two factors, accumulated in float32 at least."""
  ((left_sum,), (right_sum,)), batch = parameters["dimension_numbers"]
  left, right = inputs
  # Leading axes have size 1 here.
  leading = tuple(left.shape[axis] for axis in batch[0])
  left_sum -= sum(axis < left_sum for axis in batch[0])
  right_sum -= sum(axis < right_sum for axis in batch[1])
  left, right = (
    each.reshape([n for m, n in enumerate(each.shape) if m not in axes])
    if axes
    else each
    for each, axes in zip((left, right), batch)
  )
  product = matrix_product(
    left,
    right,
    (left_sum, right_sum),
    tuple(dtypes),
    kernel_precision(parameters["precision"]),
    is_interpreted,
  )
  return product.reshape(*leading, *product.shape) if leading else product


def _widened(value):
  dtype = jnp.result_type(value)
  if wide(dtype) == dtype:
    return value
  return jnp.asarray(value).astype(wide(dtype))


def replacement_of(jaxpr: Jaxpr, rules: Rules) -> Callable | None:
  """What the kernel evaluates in place of a called function, or None."""
  # Functions of the user may have the same name.
  source = jaxpr.debug_info
  additive = "weighted_tanh_sum", additive_kernel.__file__
  is_additive = (source.func_name, source.func_filename) == additive
  return rules.weighted_tanh_sum if is_additive else None
