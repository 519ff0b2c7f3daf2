"""Functions of single tokens in the kernels for Hopper GPUs.

A function is traced outside of a kernel, for a tile of 64 tokens. The kernel
evaluates its operations on tiles [64, D], on numbers of tokens [64], and on
numbers of all tokens.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from attention.implementations.pallas import functions
from attention.implementations.pallas.hopper.pairs import inlined
from attention.implementations.pallas.hopper.tiles import SIDE, across
from attention.implementations.pallas.operands import Unsupported

# Operations of the compiler of kernels, and `add_any`, which is an addition.
_ELEMENTWISE = frozenset(
  re.findall(
    r"\w+",
    """
    abs add add_any and div eq exp exp2 ge gt integer_pow le log logistic lt max
    min mul ne neg not or rsqrt select_n sign square sub tanh xor
    """,
  )
)
_REDUCTIONS: dict[str, Callable] = {
  "reduce_sum": jnp.sum,
  "reduce_max": jnp.max,
}
_SHAPES = frozenset(["broadcast_in_dim", "reshape", "squeeze"])
_SAME = frozenset(["copy", "stop_gradient"])
_OPERATIONS = {
  *(*_ELEMENTWISE, *_REDUCTIONS, *_SHAPES, *_SAME),
  "convert_element_type",
}


@dataclasses.dataclass(frozen=True, eq=False)
class RowFunction:
  """A traced function of tiles [64, D] and numbers."""

  jaxpr: Jaxpr

  def __call__(self, *arguments: Any) -> list[jax.Array]:
    """The results: tiles, and for each number its parts [64]."""
    results = functions.interpret(self.jaxpr, [], arguments, _apply)
    outputs: Sequence[Any] = self.jaxpr.outvars
    return [
      _result(each, own.aval.shape) for each, own in zip(results, outputs)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
  """A number as the sum of an array [64]."""

  array: jax.Array


def _result(value: Any, shape: Sequence[int]) -> jax.Array:
  if isinstance(value, _Parts) != (math.prod(shape) == 1):
    raise Unsupported("has no numbers that are not sums over tokens")
  return value.array if isinstance(value, _Parts) else _spread(value, shape)


def traced(
  function: Callable, arguments: Sequence[jax.ShapeDtypeStruct]
) -> RowFunction:
  """Traces a function of tiles and numbers, or raises `Unsupported`."""
  closed = inlined(function, *arguments)
  if closed.consts:
    raise Unsupported("has no other arrays in functions of tokens")
  result = RowFunction(closed.jaxpr)
  wide = [jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in arguments]
  jax.eval_shape(result, *wide)
  return result


def _apply(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
  """The results of an operation; numbers have 32 bits."""
  name, parameters = equation.primitive.name, equation.params
  if name not in _OPERATIONS:
    raise Unsupported(f"does not support the operation {name} of a token")
  source = equation.invars[0].aval.shape
  shape = equation.outvars[0].aval.shape
  if name == "convert_element_type":
    return [_converted(inputs[0], parameters["new_dtype"])]
  is_number = all(size == 1 for size in source)
  if name in _SAME or (is_number and name in _REDUCTIONS):
    return inputs
  if name in _SHAPES:
    is_sum = isinstance(inputs[0], _Parts)
    if not _keeps_tokens(source, shape, parameters) or (
      is_sum and math.prod(shape) > 1
    ):
      raise Unsupported(f"has no {name} from {source} to {shape} of a token")
    return inputs[:1]
  if any(isinstance(each, _Parts) for each in inputs):
    raise Unsupported("has no functions of all tokens")
  if name in _REDUCTIONS:
    of_rows = _spread(inputs[0], source)
    if of_rows.ndim == 2:
      of_rows = _REDUCTIONS[name](of_rows, axis=1)
    if shape[:1] == (SIDE,) and 0 not in parameters["axes"]:
      return [of_rows]
    if shape in [(), (1,), (1, 1)] and name == "reduce_sum":
      return [_Parts(of_rows)]
    raise Unsupported(f"has no {name} from {source} to {shape} of tokens")
  rank = max(map(jnp.ndim, inputs))
  spread = shape if rank == 2 else (SIDE,) * rank
  inputs = [_spread(_wide(each), spread) for each in inputs]
  if name == "add_any":
    return [jax.lax.add(*inputs)]
  return functions.apply_primitive(equation, inputs)


def _wide(value: Any) -> Any:
  return _converted(value, jnp.result_type(value))


def _converted(value: Any, dtype: Any) -> Any:
  is_float = jnp.issubdtype(dtype, jnp.floating)
  if isinstance(value, _Parts):
    if not is_float:
      raise Unsupported("has no sums over tokens that are rounded")
    return value
  return jnp.asarray(value).astype(jnp.float32 if is_float else dtype)


def _keeps_tokens(source, shape, parameters) -> bool:
  """Whether an operation between shapes moves no numbers between tokens."""
  if len(shape) > 2 or len(source) > 2:
    return False
  if math.prod(source) == 1:
    return True  # a number
  if shape[:1] != (SIDE,) or source[0] != SIDE:
    return False
  axes = parameters.get("broadcast_dimensions", range(len(source)))
  is_in_order = tuple(axes) == tuple(range(len(source)))
  return is_in_order and (len(source) == 1 or source[1] in (1, *shape[1:]))


def _spread(value: Any, shape: Sequence[int]) -> jax.Array:
  """Numbers of tokens, or of all tokens, as an array of a shape."""
  shape = shape[:1] if len(shape) == 2 and shape[1] == 1 else shape
  if jnp.shape(value) == tuple(shape):
    return value
  if jnp.ndim(value) == 1:
    return across(value, tuple(shape))
  return jax.lax.broadcast_in_dim(value, tuple(shape), ())
