"""The cuDNN implementation, from a request to its result."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays.softmax import Statistics, from_lse, of_rows
from attention.implementations.blockwise import Blockwise
from attention.implementations.cudnn import obstacles
from attention.implementations.cudnn.derivatives import with_dense_derivatives
from attention.implementations.cudnn.kernel import Arrays, Kernel
from attention.implementations.cudnn.pairs import (
  Pattern,
  four_axes,
  of_batch,
  pattern_of,
  shifted,
  shifted_back,
  visible_and_bias,
)
from attention.implementations.cudnn.tokens import (
  all_batched,
  heads_of,
  mapped,
  scale_of,
  with_features,
)
from attention.implementations.non_finite import any_flagged, with_finite_tokens
from attention.implementations.reference.size import is_small
from attention.request import Request
from attention.transforms.tangent_rule import instantiated, with_tangent_rule


@dataclasses.dataclass(frozen=True)
class CuDNN:
  """cuDNN's kernel: dot products in half precision, on a GPU."""

  def obstacle(self, request: Request) -> str | None:
    """Why the kernel cannot serve a request, or None if it can."""
    return obstacles.obstacle(request)

  def __call__(self, request: Request) -> tuple[jax.Array, Any]:
    """The context [..., T, E] and statistics, of a request it can serve."""
    if not request.return_lse:
      return with_finite_tokens(request, _results)[0], None
    compute = functools.partial(with_finite_tokens, compute=_results)
    if is_small(request):
      return with_dense_derivatives(compute, request)
    return compute(request)


def _results(request: Request):
  """The context, the statistics, and the rows that attend to flagged keys."""
  tokens = all_batched(*mapped(request))
  scale = scale_of(request.score, tokens[0])
  features = obstacles.num_features(request, tokens)
  heads, memory_heads = heads_of(*tokens)
  query, key, value = (
    with_features(array.reshape(*own, *array.shape[-2:]), number)
    for own, array, number in zip(
      (heads, memory_heads, memory_heads), tokens, (features[0], *features)
    )
  )
  pattern, visible, bias, empty = pattern_of(request), None, None, None
  if pattern is None:
    pattern = Pattern()
    visible, bias = visible_and_bias(request)
    empty = ~jnp.any(visible, axis=-1)
    visible = four_axes(visible, request)
  lengths = pattern.lengths
  if lengths is not None:
    lengths = of_batch(lengths, request)
    ones = (1,) * (len(request.leading[-1:]) + 1)
    empty = (lengths <= 0).reshape(*lengths.shape, *ones)
    # The kernel's result without a key is not specified.
    length = jnp.clip(lengths, 1, request.key.shape[-2])
    lengths = length.ravel().astype(jnp.int32)
  kernel = Kernel(
    pattern.is_causal,
    pattern.window,
    scale,
    request.precision,
    request.branch,
  )
  query = shifted(query, pattern.shift)
  arrays = Arrays(query, key, value, bias, visible, lengths)
  if request.return_lse:
    results = kernel.context_and_lse(arrays)
  else:
    results = [kernel.context(arrays)]
  results = [
    shifted_back(rows, request.query.shape[-2], pattern.shift, number)
    for rows, number in zip(results, (0.0, -jnp.inf))
  ]
  return _with_leading(request, results, empty)


def _with_leading(request: Request, results, empty):
  """`_results` of the kernel's results; `empty` rows attend to no key."""
  shape = (*request.leading, request.query.shape[-2])
  context, *lses = results
  context = context[..., : request.value.shape[-1]]
  context = context.reshape(*shape, context.shape[-1])
  lse = _with_derivative(lses[0].reshape(shape), request) if lses else None
  if empty is not None:
    empty = jnp.broadcast_to(empty, shape)
    context = jnp.where(empty[..., None], 0, context)
    lse = None if lse is None else jnp.where(empty, -jnp.inf, lse)
  statistics: Statistics | None
  if lse is not None:
    statistics = from_lse(lse)
  else:
    statistics = None if empty is None else of_rows(~empty, request.dtype)

  def rows_attending(keys, queries=None):
    visible, _ = visible_and_bias(request, with_bias=False)
    return any_flagged(visible, keys, queries)

  return context, statistics, rows_attending


def _substituted(value, carrier):
  """The value, with the derivatives of the carrier."""

  def first(value, carrier):
    del carrier
    return value

  def rule(primals, tangents):
    return _substituted(*primals), instantiated(tangents[1])

  return with_tangent_rule(first, rule, value, carrier)


def _with_derivative(lse, request: Request):
  """The kernel has no derivative of the lse; that is computed blockwise."""
  without_values = dataclasses.replace(request, value=request.value[..., :0])
  carrier = Blockwise()(without_values)[1].lse
  return _substituted(jax.lax.stop_gradient(lse), carrier.astype(lse.dtype))
