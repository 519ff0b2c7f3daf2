"""Which requests the kernels serve, and their functions of pairs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.implementations.dot_products import is_dot_product
from attention.implementations.pallas.hopper.kernels import calls
from attention.implementations.pallas.hopper.plan import InKernelMaps
from attention.implementations.pallas.hopper.problem import Problem
from attention.implementations.pallas.hopper.scores import normalization
from attention.implementations.pallas.hopper.scores.additive import additive_sum
from attention.implementations.pallas.hopper.scores.channels import ChannelSum
from attention.implementations.pallas.hopper.scores.function_sum import (
  FunctionSum,
  of_function,
)
from attention.implementations.pallas.hopper.terms import by_distance, scales
from attention.implementations.pallas.hopper.terms.by_distance import Distances
from attention.implementations.pallas.hopper.terms.by_sinusoids import Sinusoids
from attention.implementations.pallas.hopper.terms.score_term import ScoreTerm
from attention.implementations.pallas.hopper.terms.token_maps import TokenMap
from attention.implementations.pallas.hopper.tiles.layout import TILE
from attention.implementations.pallas.hopper.traced import bias_by_distance
from attention.implementations.pallas.hopper.traced.pairs import PairFunction
from attention.implementations.pallas.hopper.traced.traced_pairs import (
  of_request,
  of_wrappers,
)
from attention.implementations.pallas.location import ProductWithVectors
from attention.implementations.pallas.normalizers import Sparse
from attention.implementations.pallas.operands import (
  Kind,
  Operand,
  Unsupported,
  aligned_right,
  of_parameter,
)
from attention.implementations.pallas.products import kernel_precision
from attention.implementations.pallas.wrapped import base
from attention.masks.tile_visibility import grid_visibility
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
  request: Request,
  inside: InKernelMaps,
  tokens: Sequence[jax.Array],
  interpret: Any,
) -> Problem:
  """The kernels of a request, for what `plan` returns and its mapped tokens.

  Raises `Unsupported` for what they do not support.
  """
  request = dataclasses.replace(request, score=inside.score)
  query, key = _multiplied(request, inside)
  score = base(request.score)
  term = inside.term or by_distance.of_request(request, *tokens[:2])
  has_products = isinstance(term, Distances | Sinusoids)
  channels = None if has_products else _channels(score, query, key)
  _check_tokens(request, query, key, channels is not None)
  finish = channels.finish if isinstance(channels, FunctionSum) else None
  changed = of_wrappers("score", request, finish)
  if inside.prediction is not None and changed is not None:
    changed = inside.prediction.named(changed)
  bias, visible, dropout = of_request(request)
  # Besides other sums a block has no memory for those of a bias.
  has_sums = channels is not None or term is not None
  rank = len(request.leading)
  term = term or ScoreTerm()
  of_key, key_scale = term.maps.get("key"), None
  if of_key is not None and of_key.is_scaling:
    key_scale = functools.partial(
      _key_scale, of_key, tokens[1], rank, interpret
    )
  problem = Problem(
    leading=request.leading,
    tiles=grid_visibility(request.mask, request.scores_shape[-2:], TILE),
    channels=channels,
    factor=_factor(score, query) if channels is None else 1.0,
    changed=changed,
    bias=bias,
    visible=visible,
    term=term,
    prediction=inside.prediction,
    key_scale=key_scale,
    of_bias=None
    if has_sums
    else bias_by_distance.gradient_of(request.bias, bias),
    bias_numbers=_bias_numbers(bias),
    normalizer=normalization.terms_of(request),
    sparse=(
      request.normalizer if isinstance(request.normalizer, Sparse) else None
    ),
    dropout=dropout,
    has_gradients=query.shape[-1] <= _GRADIENT_FEATURES,
    weight=_weight(score, channels, rank),
    is_masked=request.is_masked,
    bias_may_hide=request.bias_may_hide,
    interpret=interpret,
  )
  return _fitting(problem, tokens)


def _fitting(problem: Problem, tokens: Sequence[jax.Array]) -> Problem:
  """The problem, without kernels of gradients that need too much memory.

  Those of arrays of the bias are left out first.
  """
  found: dict[str, Any] = {}

  def trace(*tokens):
    # A problem keeps its arrays, and these are tracers. Scales need a kernel.
    own = dataclasses.replace(problem)
    if own.key_scale is not None:
      numbers = Operand(jnp.zeros(tokens[1].shape[-2:-1]), Kind.ROW, ())
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


def _multiplied(request: Request, inside: InKernelMaps) -> list[Any]:
  """Queries and keys, or their shapes and dtypes, as kernels multiply them."""
  tokens = request.query, request.key
  if isinstance(inside.term, Sinusoids):
    return [*tokens]
  functions = request.score.map_query, request.score.map_key
  return [*map(jax.eval_shape, functions, tokens)]


def _key_scale(
  of_key: TokenMap, key: jax.Array, rank: int, interpret: Any
) -> Operand:
  """The scales of keys, by which kernels multiply scores."""
  numbers = scales.of_keys(of_key, key, interpret)
  return Operand(numbers, Kind.ROW, aligned_right(numbers.shape[:-1], rank))


def _factor(score: Any, query: jax.Array) -> float:
  """The number by which products of tokens are multiplied."""
  factor: Any = 1.0
  if isinstance(score, ScaledDot):
    factor = score.factor(query)
  elif isinstance(score, Shaw | Disentangled | TransformerXL):
    number = 1
    if isinstance(score, Disentangled):
      tables = score.relative_keys, score.relative_queries
      number += sum(table is not None for table in tables)
    default = (number * query.shape[-1]) ** -0.5
    factor = default if score.scale is None else score.scale
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
