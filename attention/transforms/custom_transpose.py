"""Linear functions with a transpose of their own.

`jax.custom_jvp` lets a kernel have a rule for tangents, and JAX derives reverse
mode from that rule. Where a kernel computes reverse mode faster, the rule calls
`with_transpose`: forward mode and derivatives of higher order differentiate
`function`, and reverse mode calls `transpose`. `jax.custom_vjp` would exclude
forward mode, and `jax.custom_derivatives.linear_call` has no derivative with
respect to its residuals.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from attention.arrays import axes
from attention.arrays.matmul import matmul_precision, precision_name
from attention.transforms.tangent_rule import instantiated, with_tangent_rule

# (residuals, arguments) -> results, linear in the arguments.
# `with_kernel_as_transpose` gives None for cotangents that are zero.
Linear = Callable[[list[Any], list[Any]], list[Any]]


def with_transpose(
  function: Linear,
  transpose: Linear,
  residuals: list[jax.Array],
  arguments: list[jax.Array],
  *,
  symbolic_zeros: bool = False,
) -> list[jax.Array]:
  """`function`, whose reverse mode is `transpose`."""
  # `transpose` receives the residuals and the cotangents of the results, and
  # returns the cotangents of the arguments. Both must be differentiable. With
  # `symbolic_zeros` it receives None for results that are not used.
  # Under `jax.shard_map` JAX sums the cotangent of an array that all devices
  # share where the array becomes one of each device.
  arguments = axes.varying_like([*residuals, *arguments], arguments)
  return _linear.bind(
    *residuals,
    *arguments,
    function=_with_precision(function),
    transpose=_with_precision(transpose),
    number=len(residuals),
    has_own_derivatives=False,
    symbolic_zeros=symbolic_zeros,
  )


def with_mutual_transpose(
  function: Linear,
  transpose: Linear,
  residuals: list[jax.Array],
  arguments: list[jax.Array],
) -> list[jax.Array]:
  """`with_transpose` for functions that are the transposes of each other."""
  # Reverse mode of reverse mode then differentiates neither of them.
  return with_transpose(
    function,
    functools.partial(with_mutual_transpose, transpose, function),
    residuals,
    arguments,
  )


def with_own_derivatives(
  function: Linear,
  transpose: Linear,
  residuals: list[jax.Array],
  arguments: list[jax.Array],
) -> list[jax.Array]:
  """`function`, which only `jax.linear_transpose` transposes by `transpose`."""
  # Derivatives are those of `function`, so that it need not be linear for JAX.
  # Under `jax.shard_map` arguments must vary over all mesh axes of the results.
  return _linear.bind(
    *residuals,
    *arguments,
    function=_with_precision(function),
    transpose=_with_precision(transpose),
    number=len(residuals),
    has_own_derivatives=True,
    symbolic_zeros=False,
  )


def with_kernel_as_transpose(
  function: Linear,
  kernel: Linear | None,
  residuals: list[jax.Array],
  arguments: list[jax.Array],
) -> list[jax.Array]:
  """`with_transpose` for a transpose that has no derivatives of its own."""
  # Its derivatives are those of the transposed `function`, which also replaces
  # the kernel if that is None.
  arguments = axes.varying_like([*residuals, *arguments], arguments)
  shapes = [*map(jax.typeof, arguments)]

  def transposed(residuals, cotangents):
    def linear(*arguments):
      return function(residuals, [*arguments])

    results = jax.make_jaxpr(linear)(*shapes).out_avals
    cotangents = [
      ad.instantiate_zeros(ad.Zero(result)) if each is None else each
      for each, result in zip(cotangents, results)
    ]
    return [*jax.linear_transpose(linear, *shapes)(cotangents)]

  def reverse(residuals, cotangents):
    if kernel is None:
      return transposed(residuals, cotangents)
    return with_tangent_rule(kernel, rule, [*residuals], [*cotangents])

  def rule(primals, tangents):
    tangents = jax.tree.map(instantiated, tangents)
    return reverse(*primals), jax.jvp(transposed, primals, tangents)[1]

  return with_transpose(
    function, reverse, residuals, arguments, symbolic_zeros=True
  )


def _with_precision(function: Linear) -> Linear:
  """A function with the current precision of products, when it is traced."""
  # JAX traces it again when it differentiates or lowers the primitive.
  precision = precision_name(None)

  def computed(residuals, arguments):
    with matmul_precision(precision):
      return function(residuals, arguments)

  return computed


_linear = Primitive("linear_with_transpose")
_linear.multiple_results = True


@_linear.def_impl
def _result(*values, function, transpose, number, **options):
  del transpose, options
  return function([*values[:number]], [*values[number:]])


@_linear.def_abstract_eval
def _shapes(*values, function, transpose, number, **options):
  del transpose, options
  return jax.make_jaxpr(
    lambda *arrays: function([*arrays[:number]], [*arrays[number:]])
  )(*values).out_avals


def _jvp(primals, tangents, **parameters):
  number = parameters["number"]
  plain = functools.partial(_result, **parameters)
  if parameters["has_own_derivatives"]:
    known = [None if _is_zero(each) else each for each in tangents]
    return jvp_of_active(plain, primals, known)
  arrays = [*map(ad.instantiate_zeros, tangents)]
  results = _linear.bind(*primals, **parameters)
  if all(map(_is_zero, tangents[:number])):
    values = *primals[:number], *arrays[number:]
    return results, _linear.bind(*values, **parameters)
  return results, jax.jvp(plain, [*primals], arrays)[1]


def jvp_of_active(function, primals, tangents):
  """`jax.jvp` with respect to the arguments whose tangents are not None."""
  active = [n for n, each in enumerate(tangents) if each is not None]

  def of_active(*values):
    merged = [*primals]
    for n, value in zip(active, values):
      merged[n] = value
    return function(*merged)

  known = [tangents[n] for n in active]
  return jax.jvp(of_active, [primals[n] for n in active], known)


def _is_zero(tangent) -> bool:
  return isinstance(tangent, ad.Zero)


def _transpose(
  cotangents, *values, function, transpose, number, symbolic_zeros, **options
):
  del function, options
  arguments = values[number:]
  if symbolic_zeros:
    cotangents = [None if _is_zero(each) else each for each in cotangents]
  else:
    cotangents = [*map(ad.instantiate_zeros, cotangents)]
  of_arguments = transpose([*values[:number]], cotangents)
  if len(of_arguments) != len(arguments):
    raise ValueError(
      f"transpose must return {len(arguments)} cotangents, one for each "
      f"argument, it returned {len(of_arguments)}"
    )
  return [None] * number + [*of_arguments]


def _batched(axis, values, axes, **parameters):
  if all(each is None for each in axes):
    results = _linear.bind(*values, **parameters)
    return results, [None] * len(results)
  # All arrays get the axis, as the transpose cannot know which ones have it.
  values = [
    jnp.broadcast_to(value, (axis.size, *value.shape))
    if own is None
    else jnp.moveaxis(value, own, 0)
    for value, own in zip(values, axes)
  ]
  # With the name of the axis, over which collectives may communicate.
  vmap = functools.partial(jax.vmap, axis_name=axis.name)
  batched = {name: vmap(parameters[name]) for name in ("function", "transpose")}
  results = _linear.bind(*values, **parameters | batched)
  return results, [0] * len(results)


ad.primitive_jvps[_linear] = _jvp
ad.primitive_transposes[_linear] = _transpose
batching.fancy_primitive_batchers[_linear] = _batched
mlir.register_lowering(_linear, mlir.lower_fun(_result, multiple_results=True))
