"""The rule for tangents of kernels, which is that of blockwise attention."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.softmax import Statistics
from attention.implementations.blockwise import Blockwise
from attention.implementations.closure import Program, without_captured
from attention.implementations.pallas.normalizers import Sparse
from attention.normalizers import is_online
from attention.request import Request


class Arguments(NamedTuple):
  """The arrays of a call; the rule captured some, and kernels read others."""

  captured: list[Any]
  operands: list[jax.Array]
  tokens: list[jax.Array]  # the mapped query and key, and the value

  @property
  def linear(self) -> list[Any]:
    """The arrays, or tangents, of which the result is differentiable."""
    return [*self.captured, *self.tokens]

  def with_linear(self, chosen: Sequence[int], arrays) -> "Arguments":
    """The arguments with other arrays at these places of `linear`."""
    values, number = self.linear, len(self.captured)
    for place, array in zip(chosen, arrays):
      values[place] = array
    return self._replace(captured=values[:number], tokens=values[number:])


def make_rule(
  request: Request, tokens: Sequence[jax.Array]
) -> tuple[Program, list[Any]]:
  """The rule of a request for mapped tokens, and the arrays it captured.

  The rule is a function (captured, tokens, context, statistics) -> context and
  total, with the derivatives of blockwise attention. Entmax and sparsemax have
  those of `blockwise.rows`, which compute the context again, and none of the
  total.
  """
  if isinstance(request.normalizer, Sparse):
    request = dataclasses.replace(
      request, normalizer=request.normalizer.normalizer
    )
  request = dataclasses.replace(request, combined=None)

  def rule(tokens, context, statistics):
    if not is_online(request.normalizer):
      context, _ = Blockwise().of_mapped(request, *tokens)
      return context, statistics.total
    own = dataclasses.replace(request, combined=(context, statistics))
    context, statistics = Blockwise().of_mapped(own, *tokens)
    return context, statistics.total

  def results(*tokens):
    shape = (*request.leading, tokens[0].shape[-2], tokens[-1].shape[-1])
    zero = axes.varying_zero(tokens, request.dtype)
    return [jnp.broadcast_to(zero, each) for each in (shape, shape[:-1])]

  context, row = jax.make_jaxpr(results)(*tokens).out_avals
  return without_captured(rule, [*tokens], context, Statistics(row, row))
