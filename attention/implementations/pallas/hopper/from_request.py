"""Which requests the kernels serve, and their functions of pairs."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.dot_products import is_dot_product
from attention.implementations.pallas.hopper import local
from attention.implementations.pallas.hopper.kernels import calls
from attention.implementations.pallas.hopper.problem import Problem
from attention.implementations.pallas.hopper.scores import (
  normalization,
  projections,
)
from attention.implementations.pallas.hopper.scores.additive import additive_sum
from attention.implementations.pallas.hopper.scores.channels import ChannelSum
from attention.implementations.pallas.hopper.scores.function_sum import (
  FunctionSum,
  of_function,
)
from attention.implementations.pallas.hopper.scores.projections import (
  Projections,
)
from attention.implementations.pallas.hopper.terms import (
  by_distance,
  by_sinusoids,
  scales,
  token_maps,
)
from attention.implementations.pallas.hopper.terms.by_sinusoids import Sinusoids
from attention.implementations.pallas.hopper.terms.token_maps import (
  TokenMap,
  changes_tokens,
)
from attention.implementations.pallas.hopper.tiles.layout import SIDE, TILE
from attention.implementations.pallas.hopper.traced import bias_by_distance
from attention.implementations.pallas.hopper.traced.pairs import PairFunction
from attention.implementations.pallas.hopper.traced.traced_pairs import (
  of_dropout,
  of_pairwise,
  of_wrappers,
)
from attention.implementations.pallas.location import ProductWithVectors
from attention.implementations.pallas.maps import MapsInside
from attention.implementations.pallas.normalizers import Sparse
from attention.implementations.pallas.operands import (
  Kind,
  Operand,
  Unsupported,
  of_parameter,
)
from attention.implementations.pallas.products import kernel_precision
from attention.implementations.pallas.wrapped import (
  base,
  wrappers,
)
from attention.masks.tile_visibility import grid_visibility
from attention.masks.types import Below
from attention.request import Request
from attention.scores.classical import AdditiveProduct, ScaledDot
from attention.scores.relative import Disentangled, Shaw
from attention.scores.sinusoidal import TransformerXL

# Tensor cores sum over so many features at once.
_STEP = 16
_HALF = ("bfloat16", "float16")
# The features or channels for which the gradients' sums fit into a block.
_GRADIENT_FEATURES = 128


def make_problem(
  request: Request, tokens: Sequence[jax.Array], interpret: Any
) -> Problem:
  """The kernels of a request, for mapped tokens.

  Raises `Unsupported` for what they do not support.
  """
  query: Any = tokens[0]
  key: Any = tokens[1]
  inside = _Inside()
  if isinstance(request.score, MapsInside):
    request = dataclasses.replace(request, score=request.score.score)
    request, inside = _inside(request, key, interpret)
    # Products of keys with the ends of tables are made before the kernels.
    has_tables = type(base(request.score)) in (Shaw, Disentangled)
    if inside.sinusoids is None and not has_tables:
      query, key = _mapped(request, query, key)
  score = base(request.score)
  distances = by_distance.of_request(request, query, key)
  has_terms = distances is not None or inside.sinusoids is not None
  channels = None if has_terms else _channels(score, query, key)
  _check_tokens(request, query, key, channels is not None)
  finish = channels.finish if isinstance(channels, FunctionSum) else None
  changed, bias, visible = _functions(request, finish, inside.prediction)
  others = channels, distances, inside.sinusoids, inside.maps
  problem = Problem(
    leading=request.leading,
    tiles=grid_visibility(request.mask, request.scores_shape[-2:], TILE),
    channels=channels,
    factor=_factor(score, query) if channels is None else 1.0,
    changed=changed,
    bias=bias,
    visible=visible,
    **inside._asdict(),
    distances=distances,
    of_bias=_bias_gradient(request, bias, *others),
    bias_numbers=_bias_numbers(bias),
    normalizer=normalization.terms_of(request),
    sparse=(
      request.normalizer if isinstance(request.normalizer, Sparse) else None
    ),
    dropout=of_dropout("dropout", request),
    has_gradients=query.shape[-1] <= _GRADIENT_FEATURES,
    weight=_weight(score, channels, len(request.leading)),
    is_masked=request.is_masked,
    interpret=interpret,
  )
  return _fitting(problem, tokens)


class _Inside(NamedTuple):
  """What kernels compute of tokens, by the fields of `Problem`."""

  maps: Mapping[str, TokenMap] = MappingProxyType({})
  key_scale: Callable[[], jax.Array] | None = None
  projections: Projections | None = None
  sinusoids: Sinusoids | None = None
  prediction: local.Prediction | None = None


def _inside(
  request: Request, key: jax.Array, interpret: Any
) -> tuple[Request, _Inside]:
  """What kernels compute of tokens, and the request with the rest."""
  prediction = local.of_request(request)
  if prediction is not None:
    request = dataclasses.replace(request, score=prediction.score)
  inside = _Inside(prediction=prediction)
  sinusoids = by_sinusoids.of_request(request)
  if sinusoids is not None:
    return request, inside._replace(sinusoids=sinusoids)
  of_tokens = projections.of_request(request)
  if of_tokens is not None:
    return request, inside._replace(projections=of_tokens)
  inside = inside._replace(maps=token_maps.inside(request))
  of_key = inside.maps.get("key")
  if of_key is not None and of_key.is_scaling:
    scale = functools.partial(scales.of_keys, of_key, key, interpret)
    inside = inside._replace(key_scale=scale)
  return request, inside


def _functions(
  request: Request, finish: Any, prediction: local.Prediction | None
) -> tuple[PairFunction | None, PairFunction | None, PairFunction | None]:
  """What wrappers change of pairs, the bias and the mask."""
  key_length = request.scores_shape[-1]
  biases = [] if request.bias is None else [request.bias]
  masks = [] if request.mask is None else [request.mask]
  if key_length % SIDE:
    masks.append(Below(key_length))
  changed = of_wrappers("score", request, finish)
  if prediction is not None and changed is not None:
    changed = prediction.named(changed)
  return (
    changed,
    of_pairwise("bias", biases, request),
    of_pairwise("mask", masks, request),
  )


def _fitting(problem: Problem, tokens: Sequence[jax.Array]) -> Problem:
  """The problem, without kernels of gradients that need too much memory.

  Those of arrays of the bias are left out first.
  """
  found: dict[str, Any] = {}

  def trace(*tokens):
    # A problem keeps its arrays, and these are tracers. Scales need a kernel.
    own = dataclasses.replace(problem)
    if own.key_scale is not None:
      numbers = jnp.zeros(tokens[1].shape[:-1])
      own = dataclasses.replace(own, key_scale=lambda: numbers)
    arrays = calls.Arrays(own.arrays, tokens)
    if not calls.forward_fits(own, arrays):
      raise Unsupported("needs more shared memory than a block can have")
    for names in (problem.bias_numbers, ()):
      own = dataclasses.replace(own, bias_numbers=names)
      fits = own.has_gradients and calls.gradients_fit(own, arrays)
      found.update(bias_numbers=names, has_gradients=fits)
      if fits:
        break

  jax.eval_shape(trace, *tokens)
  return dataclasses.replace(problem, **found)


def _mapped(request: Request, query, key) -> list[jax.ShapeDtypeStruct]:
  """The shapes and dtypes of tokens as the kernels multiply them."""
  functions = request.score.map_query, request.score.map_key
  return [*map(jax.eval_shape, functions, (query, key))]


def _factor(score: Any, query: jax.Array) -> float:
  """The number by which products of tokens are multiplied."""
  factor: Any = 1.0
  if isinstance(score, ScaledDot):
    factor = score.factor(query)
  elif isinstance(score, Shaw | Disentangled):
    factor = by_distance.factor(score, query)
  elif isinstance(score, TransformerXL):
    factor = query.shape[-1] ** -0.5 if score.scale is None else score.scale
  if not isinstance(factor, float | int):
    raise Unsupported("needs a scale that is a number")
  return float(factor)


def _weight(
  score: Any, channels: ChannelSum | None, rank: int
) -> Operand | None:
  """The weight of the channels of an additive score."""
  if channels is None or isinstance(channels, FunctionSum):
    return None
  return of_parameter(score.score_weight, 1, rank)


def _bias_gradient(
  request: Request, function: Any, *others: Any
) -> bias_by_distance.BiasGradient | None:
  """The bias whose gradient kernels compute, if they have the memory."""
  if any(others):
    return None
  return bias_by_distance.gradient_of(request.bias, function)


def _bias_numbers(function: PairFunction | None) -> list[str]:
  """The arrays of a bias whose gradients kernels compute."""
  if function is None:
    return []
  return [
    name
    for name, each in zip(function.names, function.operands)
    if jnp.issubdtype(each.array.dtype, jnp.floating)
    and each.kind is not Kind.WHOLE
  ]


def with_maps_inside(request: Request) -> Request:
  """The request with a score that maps tokens in kernels, if they can."""
  score = base(request.score)
  if local.of_request(request) is not None:
    return dataclasses.replace(request, score=MapsInside(request.score))
  if type(score) is TransformerXL:
    are_inside = not any(map(changes_tokens, wrappers(request.score)))
  elif is_dot_product(score):
    are_inside = bool(token_maps.inside(request))
  else:
    are_inside = projections.of_request(request) is not None
  if not are_inside:
    return request
  return dataclasses.replace(request, score=MapsInside(request.score))


def _channels(score: Any, query, key) -> ChannelSum | None:
  """The terms of a score that is a sum over channels; None for products."""
  if is_dot_product(score):
    return None
  if type(score).pair is AdditiveProduct.pair and not score.reads_positions:
    return additive_sum(query.shape[-1])
  if score.reads_positions:
    raise Unsupported(
      "has no scores whose base depends on positions, got "
      f"{type(score).__name__}; scores.modified adds positions to another score"
    )
  if query.shape[-1] != key.shape[-1]:
    raise Unsupported("needs queries and keys with as many features")
  return of_function(score, query.shape[-1])


def _check_tokens(request: Request, query, key, has_channels: bool) -> None:
  """Checks dtypes and sizes."""
  tokens = [request.value]
  if not has_channels:
    # Products of mapped tokens that are wider are rounded to these.
    tokens.append(request.query)
    if not isinstance(base(request.score), ProductWithVectors):
      tokens.append(request.key)
    if kernel_precision(request.precision) != jax.lax.Precision.DEFAULT:
      tokens += [query, key]
  if any(str(each.dtype) not in _HALF for each in tokens):
    raise Unsupported("needs tokens of bfloat16 or float16")
  size, features = request.value.shape[-1], query.shape[-1]
  if size % _STEP or size > 128 or (not has_channels and features % _STEP):
    raise Unsupported(
      f"needs features that are a multiple of {_STEP}, and at most 128 of "
      f"values, got {features} and {size}"
    )
  if features > 256:
    raise Unsupported(f"has at most 256 features or channels, got {features}")
