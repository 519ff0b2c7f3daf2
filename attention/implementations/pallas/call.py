"""A call of the kernels, from a request to its result."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.arrays import axes
from attention.arrays.softmax import Statistics, part_of
from attention.implementations import non_finite
from attention.implementations.pallas import hopper, tpu
from attention.implementations.pallas.blockwise_rule import Arguments, make_rule
from attention.implementations.pallas.derivative import (
  KernelAttention,
  shared_operands,
)
from attention.implementations.pallas.hopper.terms import token_maps
from attention.implementations.pallas.implementation import Pallas
from attention.implementations.pallas.location import with_vectors_as_keys
from attention.implementations.pallas.maps import MapsInside
from attention.implementations.pallas.normalizers import with_online_normalizer
from attention.implementations.pallas.operands import Unsupported
from attention.implementations.pallas.running_sums import make_running_sums
from attention.implementations.pallas.score_parameters import Undeclared
from attention.normalizers import is_softmax
from attention.request import Request
from attention.scores.decay import with_running_sums
from attention.scores.tracing import is_of_each_head
from attention.transforms.static_zeros import StaticZeros

Tokens = tuple[jax.Array, jax.Array, jax.Array]


def obstacle(options: Pallas, request: Request) -> str | None:
  """Why kernels do not support the functions of a request; None if they do."""
  is_on_gpu = options.target_of(request) == "hopper"
  if is_on_gpu and axes.are_varying(_arrays(request)):
    return "needs jax.shard_map(..., check_vma=False)"
  has_float16 = any(each.dtype == jnp.float16 for each in request.tokens)
  if has_float16 and not is_on_gpu and not options.interpret:
    return "has no float16 on TPUs; their 16 bits are those of bfloat16"

  if not is_of_each_head(request.score, request.query, request.key):
    return str(Undeclared())
  try:
    request = with_online_normalizer(request)
    # Sums over positions and maps of tokens are traced, not computed.
    jax.eval_shape(lambda: (_planned(options, _with_own_arrays(request)), 0)[1])
  except Unsupported as reason:
    return str(reason)
  return None


def compute(options: Pallas, request: Request) -> tuple[jax.Array, Statistics]:
  """The context and the statistics; `options` is the implementation."""
  combined = request.combined
  if combined is not None and not is_softmax(request.normalizer):
    context, _ = compute(options, dataclasses.replace(request, combined=None))
    return part_of(combined, context)
  request = with_online_normalizer(request)
  if request.platform is None or request.combined is not None:
    return _computed(options, request)
  # Outside of `jax.jit` kernels would be compiled at every call.
  arrays = _arrays(request) | {"dropout": request.dropout}
  arrays["score"] = StaticZeros(request.score)
  constants = {
    name: getattr(request, name)
    for name in ("scores_shape", "elements_per_pair", "precision", "normalizer")
  }
  # A mask without arrays stays known, so that its hidden tiles are skipped.
  if not any(isinstance(x, jax.Array) for x in jax.tree.leaves(request.mask)):
    constants["mask"] = arrays.pop("mask")
  numbers = jax.Array | np.ndarray | int | float
  if not all(isinstance(leaf, numbers) for leaf in jax.tree.leaves(arrays)):
    return _computed(options, request)
  constants["branch"] = request.target
  return _compiled(options, (*constants.items(),), arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(
  options: Pallas, constants: tuple[tuple[str, Any], ...], arrays: dict
) -> tuple[jax.Array, Statistics]:
  """`compute` for the fields of a request."""
  score = arrays["score"].tree
  fields = {**dict(constants), **arrays, "score": score}
  return _computed(options, Request(**fields))


def _computed(
  options: Pallas, request: Request
) -> tuple[jax.Array, Statistics]:
  if options.absent_platform is not None:
    # Derivatives by XLA have tiles for that platform too.
    request = dataclasses.replace(request, branch=options.absent_platform)
  request = _with_own_arrays(request)
  request, tokens, kernels = _planned(options, _varying_alike(request))
  rule, captured = make_rule(request, tokens)
  shared = shared_operands(captured, kernels.differentiable_operands)
  attention = KernelAttention(kernels, rule, shared, request.score.is_finite)
  arguments = Arguments(captured, kernels.arrays, [*tokens])
  return attention(arguments, request.combined)


def _arrays(request: Request) -> dict[str, Any]:
  """What has arrays in a request, by name."""
  names = ("query", "key", "value", "score", "mask", "bias")
  return {name: getattr(request, name) for name in names}


def _with_own_arrays(request: Request) -> Request:
  """The request with a tracer of its own for each array of score and bias.

  Operands of kernels are found by identity. An array that is used twice could
  have one use that kernels do not differentiate. Arrays of float64 are rounded
  if the tokens are float32, because kernels have no other dtype.
  """

  def own(leaf):
    if hasattr(leaf, "dtype") and jnp.result_type(leaf) == jnp.float64:
      return jnp.asarray(leaf, request.dtype, copy=True)
    return jnp.copy(leaf) if isinstance(leaf, jax.core.Tracer) else leaf

  score, bias = jax.tree.map(own, (request.score, request.bias))
  return dataclasses.replace(request, score=score, bias=bias)


def _varying_alike(request: Request) -> Request:
  """The request with arrays that vary over the same axes of a mesh."""
  # Under `jax.shard_map` kernels have one type of inputs and results.
  leaves, structure = jax.tree.flatten(_arrays(request))
  places = [n for n, x in enumerate(leaves) if isinstance(x, jax.Array)]
  for n, array in zip(places, axes.varying_alike([leaves[n] for n in places])):
    leaves[n] = array
  return dataclasses.replace(request, **jax.tree.unflatten(structure, leaves))


def _planned(
  options: Pallas, request: Request
) -> tuple[Request, Tokens, tpu.Problem | hopper.Problem]:
  """The request of the tokens that kernels read, these tokens, the kernels.

  The score maps tokens in kernels, if they can.
  """
  request = _with_running_sums(options, request)
  if options.target_of(request) == "hopper":
    request, inside = hopper.plan(request)
    tokens = _mapped(options, request)
    problem = hopper.make_problem(request, inside, tokens, options.interpret)
    return request, tokens, problem
  return _planned_for_tpu(options, with_vectors_as_keys(request))


def _planned_for_tpu(
  options: Pallas, request: Request
) -> tuple[Request, Tokens, tpu.Problem]:
  """See `_planned`."""

  def planned(request):
    tokens = _mapped(options, request)
    return request, tokens, tpu.make_problem(options, request, tokens)

  inside = dataclasses.replace(request, score=MapsInside(request.score))
  try:
    jax.eval_shape(lambda: (planned(inside), 0)[1])
  except Unsupported:
    return planned(request)
  return planned(inside)


def _with_running_sums(options: Pallas, request: Request) -> Request:
  """The request with sums of gates that kernels compute."""
  sums = make_running_sums(options.target_of(request), options.interpret)
  score = with_running_sums(
    request.score, lambda numbers: sums(numbers.astype(request.dtype))
  )
  return dataclasses.replace(request, score=score)


def _mapped(options: Pallas, request: Request) -> Tokens:
  """The mapped query and key, and the value."""
  # A mapped token is NaN where a token is not finite and keys may be hidden.
  # The map then has finite derivatives, and kernels ignore such a token.
  query, key, value = request.tokens
  dtype = jnp.result_type(query, value)
  score, mapped = request.score, _mapped_tokens
  if options.target_of(request) == "hopper" and token_maps.keeps_nan(score):
    mapped = non_finite.mapped
  return (
    mapped(score.map_query, query, is_masked=request.is_masked),
    mapped(score.map_key, key, is_masked=request.is_masked),
    value.astype(dtype),
  )


def _mapped_tokens(function: Callable, tokens, *, is_masked: bool) -> jax.Array:
  if not is_masked or _only_scales(function, tokens):
    return function(tokens)
  finite = jnp.isfinite(tokens)
  mapped = function(jnp.where(finite, tokens, jnp.zeros_like(tokens)))
  is_finite = jnp.all(finite, axis=-1, keepdims=True)
  return jnp.where(is_finite, mapped, jnp.full_like(mapped, jnp.nan))


def _only_scales(function: Callable, tokens) -> bool:
  """Whether a map multiplies tokens by numbers; it then keeps NaN."""
  closed = jax.make_jaxpr(function)(tokens)
  names = {equation.primitive.name for equation in closed.jaxpr.eqns}
  scales = {"mul", "convert_element_type", "broadcast_in_dim", "reshape"}
  return not closed.consts and names <= scales
