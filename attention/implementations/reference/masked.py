"""The result of a call with a mask, without a search for NaN.

The scores of hidden pairs are replaced, so that NaN in a hidden token changes
nothing. NaN in a visible one spreads through the score, the softmax and the
average. No pass over the pairs finds the rows that attend to it.
"""

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.softmax import Statistics
from attention.implementations.reference.average import average, statistics
from attention.implementations.reference.flagged_scores import flagged_scores
from attention.implementations.reference.pairs import (
  multiplier,
  visible_and_bias,
)
from attention.normalizers import is_softmax
from attention.request import Request
from attention.transforms.custom_transpose import with_own_derivatives


def serves(request: Request) -> bool:
  """Whether the request is a masked softmax over all keys."""
  return (
    request.is_masked
    and is_softmax(request.normalizer)
    and request.score.denominator is None
    and request.combined is None
    # The scores have flags of values, whose other leading axes they would get.
    and request.leading == request.scores_shape[:-2]
  )


def results(request: Request) -> tuple[jax.Array, Statistics | None]:
  """The context and, where needed, the statistics.

  Rows that attend to NaN or infinity are NaN. The statistics are not, if only
  values are.
  """
  value = request.value.astype(jnp.result_type(request.query, request.value))
  arrays, scores_of = flagged_scores(request)
  given = arrays, *visible_and_bias(request), multiplier(request)

  def compute(arrays, visible, bias, multipliers, value) -> list[jax.Array]:
    flags = None
    if request.return_lse:
      scores = sum(bias, scores_of(arrays, None))
      flags = jnp.sum(value.astype(request.dtype) * 0.0, axis=-1)
    else:
      scores = sum(bias, scores_of(arrays, value))
    values = scores, visible, flags, multipliers, value
    return [average(request.dtype, request.precision, *values)]

  # The context is linear in the value only.
  leaves, structure = jax.tree.flatten(given)
  *residuals, argument = axes.varying_alike([*leaves, value])

  def function(residuals, arguments):
    return compute(*jax.tree.unflatten(structure, residuals), *arguments)

  def transpose(residuals, cotangents):
    # `jax.linear_transpose` assumes that all values are finite.
    zeros = jnp.zeros(value.shape, value.dtype)
    return [
      *jax.vjp(lambda value: function(residuals, [value]), zeros)[1](cotangents)
    ]

  (context,) = with_own_derivatives(function, transpose, residuals, [argument])
  if not request.return_lse:
    return context, None
  visible, bias = given[1:3]
  rows = statistics(sum(bias, scores_of(arrays, None)), visible)
  return context, rows.broadcast_to(context.shape[:-1])
