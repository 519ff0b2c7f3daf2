"""Functions of single tokens in the kernels for Hopper GPUs.

A function is traced outside of a kernel, for a tile of 64 tokens. The kernel
evaluates its operations on tiles [64, D], on numbers of tokens [64], on numbers
of all tokens, and on matrices, by which it multiplies tiles.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from attention.implementations.pallas import evaluation
from attention.implementations.pallas.functions import without_unused
from attention.implementations.pallas.hopper.tiles.layout import SIDE, across
from attention.implementations.pallas.hopper.traced.functions import inlined
from attention.implementations.pallas.operands import Unsupported
from attention.implementations.pallas.products import kernel_precision

# Operations of the compiler of kernels.
_NAMES = """
  abs add and div eq exp exp2 ge gt integer_pow le log logistic lt max
  min mul ne neg not one_minus_square or rsqrt select_n sign square sub tanh xor
"""
_ELEMENTWISE = frozenset(_NAMES.split())
_REDUCTIONS: Any = {"reduce_sum": jnp.sum, "reduce_max": jnp.max}
_SHAPES = frozenset(["broadcast_in_dim", "reshape", "squeeze"])
_SAME = frozenset(["copy", "stop_gradient"])
_DEFAULT = jax.lax.Precision.DEFAULT
_CONVERSION = "convert_element_type"
_OPERATIONS = {*_ELEMENTWISE, *_REDUCTIONS, *_SHAPES, *_SAME, _CONVERSION}


@dataclasses.dataclass(frozen=True, eq=False)
class Matrix:
  """An array [D, A] by which tiles are multiplied."""

  array: Any  # or the name of an input
  is_transposed: bool = False

  @property
  def transposed(self) -> "Matrix":
    """The matrix [A, D]."""
    return Matrix(self.array, not self.is_transposed)


@dataclasses.dataclass(frozen=True, eq=False)
class OuterProducts:
  """The sum over tokens of outer products, [D, A], before it is computed."""

  left: jax.Array  # [64, D]
  right: jax.Array  # [64, A]

  @property
  def transposed(self) -> "OuterProducts":
    """The sum [A, D]."""
    return OuterProducts(self.right, self.left)


# (a tile [64, D], a matrix [D, A]) -> their product [64, A].
Product = Callable[[jax.Array, Matrix], jax.Array]


def product(tile: jax.Array, matrix: Matrix) -> jax.Array:
  """The product of a tile and a matrix that are arrays."""
  array = matrix.array
  return tile @ (array.T if matrix.is_transposed else array)


@dataclasses.dataclass(frozen=True, eq=False)
class RowFunction:
  """A traced function of tiles [64, D], numbers and matrices."""

  jaxpr: Jaxpr

  def __call__(self, *arguments: Any, product: Product = product) -> list[Any]:
    """The results: tiles, parts [64] of numbers, `OuterProducts`."""
    apply = functools.partial(_apply, product)
    results = evaluation.interpret(self.jaxpr, [], arguments, apply)
    outputs: Sequence[Any] = self.jaxpr.outvars
    return [
      _result(each, own.aval.shape) for each, own in zip(results, outputs)
    ]

  def scale(self, tile: jax.Array, *numbers: Any) -> jax.Array:
    """The numbers [64] by which the function multiplies the tokens of a tile.

    Raises `Unsupported` if it is another function.
    """
    arguments = _Multiple(tile, 1.0), *numbers
    apply = _apply_to_multiples
    (result,) = evaluation.interpret(self.jaxpr, [], arguments, apply)
    if not isinstance(result, _Multiple):
      raise Unsupported("has functions of tokens that multiply them by numbers")
    return _spread(result.number, (SIDE,))


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
  """A number as the sum of an array [64]."""

  array: jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class _Multiple:
  """A tile times a number, or the numbers [64] of its tokens."""

  tile: jax.Array
  number: Any

  @property
  def product(self) -> jax.Array:
    """The tile after the multiplication."""
    return self.tile * _spread(self.number, self.tile.shape)


def _apply_to_multiples(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
  """As `_apply`; products of a multiple and numbers of tokens are multiples."""
  name = equation.primitive.name
  is_multiple = [isinstance(each, _Multiple) for each in inputs]
  if is_multiple == [True] and (name in _SAME or name == _CONVERSION):
    return inputs
  if sum(is_multiple) == 1 and len(inputs) == 2:
    first, second = inputs if is_multiple[0] else inputs[::-1]
    is_product = name == "mul" or (name == "div" and is_multiple[0])
    if is_product and jnp.ndim(second) < 2:
      operation = jnp.multiply if name == "mul" else jnp.divide
      return [_Multiple(first.tile, operation(first.number, second))]
  values = [
    each.product if isinstance(each, _Multiple) else each for each in inputs
  ]
  return _apply(product, equation, values)


def _result(value: Any, shape: Sequence[int]) -> Any:
  if isinstance(value, OuterProducts):
    return value
  if isinstance(value, _Parts) != (math.prod(shape) == 1):
    raise Unsupported("has no numbers that are not sums over tokens")
  return value.array if isinstance(value, _Parts) else _spread(value, shape)


def traced(
  function: Callable,
  arguments: Sequence[jax.ShapeDtypeStruct],
  num_matrices: int = 0,
) -> RowFunction:
  """Traces a function, or raises `Unsupported`.

  Its last arguments are matrices, those before are tiles and numbers.
  """
  closed = inlined(function, *arguments)
  if closed.consts:
    raise Unsupported("has no other arrays in functions of tokens")
  jaxpr, _ = without_unused(closed.jaxpr, keep=len(arguments))
  result = RowFunction(jaxpr)
  wide = [jax.ShapeDtypeStruct(each.shape, jnp.float32) for each in arguments]
  first = len(arguments) - num_matrices

  def check(*arguments):
    matrices = map(Matrix, arguments[first:])
    results = result(*arguments[:first], *matrices)
    return [
      (each.left, each.right) if isinstance(each, OuterProducts) else each
      for each in results
    ]

  jax.eval_shape(check, *wide)
  return result


def _apply(
  product: Product, equation: Any, inputs: Sequence[Any]
) -> Sequence[Any]:
  """The results of an operation; numbers have 32 bits."""
  name, parameters = equation.primitive.name, equation.params
  if name == "dot_general":
    if kernel_precision(parameters["precision"]) != _DEFAULT:
      raise Unsupported("has products of tokens with the default precision")
    return [_multiplied(product, equation, *inputs)]
  if any(isinstance(each, Matrix | OuterProducts) for each in inputs):
    if name == "transpose":
      return [inputs[0].transposed]
    if name in _SAME or name == _CONVERSION:
      return inputs
    raise Unsupported(f"does not support the operation {name} of a matrix")
  if name not in _OPERATIONS:
    raise Unsupported(f"does not support the operation {name} of a token")
  source = equation.invars[0].aval.shape
  shape = equation.outvars[0].aval.shape
  if name == _CONVERSION:
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
  return evaluation.apply_primitive(equation, inputs)


def _multiplied(product: Product, equation: Any, left, right) -> Any:
  """A tile times a matrix, or the sum of the outer products of two tiles."""
  contracted, batch = equation.params["dimension_numbers"]
  is_tile = [isinstance(each, jax.Array) for each in (left, right)]
  left, right = (
    _spread(each, atom.aval.shape) if is_own else each
    for each, atom, is_own in zip((left, right), equation.invars, is_tile)
  )
  if contracted == ((0,), (0,)) and not any(batch) and all(is_tile):
    return OuterProducts(left, right)
  is_product = is_tile[0] and isinstance(right, Matrix)
  if not is_product or contracted[0] != (1,) or any(batch):
    raise Unsupported("has products of tokens with matrices only")
  return product(left, right if contracted[1] == (0,) else right.transposed)


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
