"""Functions of a tile as programs that a kernel evaluates.

A score, a mask and a bias are traced outside of the kernel, so that the arrays
they capture become operands. The kernel evaluates the traced operations, with
replacements: numbers of 16 bits are computed in float32, except for the factors
of matrix products, and the additive score has a loop over channels.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters import partial_eval as partial_evaluation

from attention.arrays import axes
from attention.implementations.pallas.derivative_rules import (
  has_rule,
  rule_of,
  with_rule,
)
from attention.implementations.pallas.operands import Kind, Operand, Unsupported
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
_SUPPORTED = """
  abs add add_any and atan2 ceil clamp copy cos div eq erf exp exp2 floor ge gt
  integer_pow is_finite le log log1p logistic lt max min mul ne neg not
  one_minus_square or pow
  pvary rem reshard round rsqrt select_n shift_left shift_right_logical sign sin
  sqrt square stop_gradient sub tan tanh xor

  broadcast_in_dim concatenate convert_element_type dot_general iota reduce_max
  reduce_min reduce_sum reshape slice split squeeze transpose
"""
OPERATIONS = frozenset(_SUPPORTED.split())
# Between devices of a mesh: within a kernel they change nothing.
_UNCHANGED = frozenset(["pvary", "reshard"])


class Rules(NamedTuple):
  """How a kernel evaluates traced operations."""

  operations: Mapping[str, Callable[..., jax.Array]]  # by a primitive's name
  is_interpreted: bool  # whether XLA's CPU backend computes the kernel
  # The additive score in a kernel; None evaluates its operations.
  weighted_tanh_sum: Callable[..., jax.Array] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TileFunction:
  """A traced function (arguments, parts of operands) -> array or tuple."""

  jaxpr: Jaxpr
  operands: Sequence[Operand]  # last, those that were captured
  rules: Rules

  def __call__(self, arguments: Sequence[Any], parts: Sequence[Any]) -> Any:
    """The result, or a tuple, for arguments and the parts of all operands."""
    results = evaluate_jaxpr(self.jaxpr, [], [*arguments, *parts], self.rules)
    return results[0] if len(results) == 1 else tuple(results)

  @property
  def largest_array(self) -> int:
    """The number of elements of the largest intermediate array."""
    return max(
      (
        variable.aval.size
        for equation in _equations(self.jaxpr, self.rules)
        for variable in equation.outvars
      ),
      default=1,
    )


def traced(
  function: Callable,
  arguments: Sequence[jax.ShapeDtypeStruct],
  operands: Sequence[Operand],
  tile: tuple[int, int],
  rules: Rules,
) -> TileFunction:
  """Traces function(*arguments, *parts of operands) for a tile."""
  with numbers_of_kernels(rules.is_interpreted):
    dtypes = [jax.dtypes.canonicalize_dtype(x.array.dtype) for x in operands]
  operands = [*map(_of_dtype, operands, dtypes)]
  parts = [
    jax.ShapeDtypeStruct(each.part(*tile), each.array.dtype)
    for each in operands
  ]
  with numbers_of_kernels(rules.is_interpreted):
    closed = jax.make_jaxpr(function)(*arguments, *parts)
  captured = [
    Operand(
      jnp.asarray(each, variable.aval.dtype),
      Kind.WHOLE if np.ndim(each) else Kind.SCALAR,
      (),
    )
    for variable, each in zip(closed.jaxpr.constvars, closed.consts)
  ]
  jaxpr, used = without_unused(without_constants(closed), len(arguments))
  check_supported(jaxpr, rules)
  operands = [
    *itertools.compress([*operands, *captured], used[len(arguments) :])
  ]
  return TileFunction(jaxpr, operands, rules)


def _of_dtype(operand: Operand, dtype: Any) -> Operand:
  """The operand, with an array of this dtype."""
  if operand.array.dtype == dtype:
    return operand
  return dataclasses.replace(operand, array=operand.array.astype(dtype))


def numbers_of_kernels(interpret: Any) -> AbstractContextManager:
  """What is traced has numbers of 32 bits also under `jax_enable_x64`."""
  if interpret:
    return contextlib.nullcontext()
  return jax.enable_x64(False)


def without_constants(closed: ClosedJaxpr) -> Jaxpr:
  """A jaxpr whose last arguments are the constants."""
  jaxpr = closed.jaxpr
  return jaxpr.replace(constvars=[], invars=[*jaxpr.invars, *jaxpr.constvars])


def without_unused(jaxpr: Jaxpr, keep: int) -> tuple[Jaxpr, list[bool]]:
  """Removes unused operations, and arguments after the first `keep`."""
  kept = [number < keep for number in range(len(jaxpr.invars))]
  jaxpr, used = partial_evaluation.dce_jaxpr(
    jaxpr, [True] * len(jaxpr.outvars), instantiate=kept
  )
  return jaxpr, [*used]


def check_supported(jaxpr: Jaxpr, rules: Rules) -> None:
  """Raises `Unsupported` for an operation that kernels do not have."""
  for equation in _equations(jaxpr, rules):
    name = equation.primitive.name
    if name in rules.operations:
      continue
    if name not in OPERATIONS:
      raise Unsupported(
        f"does not support the operation {name} of a score or a normalizer"
      )
    if name == "dot_general" and not _is_of_matrices(equation):
      raise Unsupported("supports products of two matrices only in a score")


def _is_of_matrices(equation: Any) -> bool:
  """Whether a product sums over one axis of matrices; leading axes are 1."""
  sums, batch = equation.params["dimension_numbers"]
  return all(
    len(axes) == 1 and variable.aval.ndim - len(leading) == 2
    for variable, axes, leading in zip(equation.invars, sums, batch)
  )


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
    replacement = _replacement(inner[0], rules)
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


def _replacement(jaxpr: Jaxpr, rules: Rules) -> Callable | None:
  """What the kernel evaluates in place of a called function, or None."""
  # Functions of the user may have the same name.
  source = jaxpr.debug_info
  additive = "weighted_tanh_sum", additive_kernel.__file__
  is_additive = (source.func_name, source.func_filename) == additive
  return rules.weighted_tanh_sum if is_additive else None


def _equations(
  jaxpr: Jaxpr, rules: Rules, with_derivatives: bool = True
) -> Iterator:
  """The operations of a jaxpr, of functions that it calls and their rules."""
  for equation in jaxpr.eqns:
    inner = called(equation)
    if inner is None:
      yield equation
    elif _replacement(inner[0], rules) is None:
      yield from _equations(inner[0], rules, with_derivatives)
      # A rule may call its function, but its derivatives are not computed.
      if with_derivatives and has_rule(equation):
        rule = rule_of(equation)[0].jaxpr
        yield from _equations(rule, rules, with_derivatives=False)
