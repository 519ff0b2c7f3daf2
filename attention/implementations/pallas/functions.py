"""Functions of a tile as programs that a kernel evaluates.

A score, a mask and a bias are traced outside of the kernel, so that the arrays
they capture become operands.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters import partial_eval as partial_evaluation

from attention.implementations.pallas.derivative_rules import (
  has_rule,
  rule_of,
)
from attention.implementations.pallas.evaluation import (
  Rules,
  called,
  evaluate_jaxpr,
  replacement_of,
)
from attention.implementations.pallas.operands import Kind, Operand, Unsupported

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
  with dtypes_of_kernels(rules.is_interpreted):
    operands = [*map(_of_own_dtype, operands)]
    parts = [
      jax.ShapeDtypeStruct(each.part(*tile), each.array.dtype)
      for each in operands
    ]
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


def _of_own_dtype(operand: Operand) -> Operand:
  """The operand; its array has a dtype of kernels."""
  dtype = jax.dtypes.canonicalize_dtype(operand.array.dtype)
  if operand.array.dtype == dtype:
    return operand
  return dataclasses.replace(operand, array=operand.array.astype(dtype))


def dtypes_of_kernels(interpret: Any) -> AbstractContextManager:
  """JAX's dtypes within it are those of kernels: none has 64 bits.

  Interpreted kernels have the dtypes of `jax_enable_x64`.
  """
  return contextlib.nullcontext() if interpret else jax.enable_x64(False)


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


def _equations(
  jaxpr: Jaxpr, rules: Rules, with_derivatives: bool = True
) -> Iterator:
  """The operations of a jaxpr, of functions that it calls and their rules."""
  for equation in jaxpr.eqns:
    inner = called(equation)
    if inner is None:
      yield equation
    elif replacement_of(inner[0], rules) is None:
      yield from _equations(inner[0], rules, with_derivatives)
      # A rule may call its function, but its derivatives are not computed.
      if with_derivatives and has_rule(equation):
        rule = rule_of(equation)[0].jaxpr
        yield from _equations(rule, rules, with_derivatives=False)
