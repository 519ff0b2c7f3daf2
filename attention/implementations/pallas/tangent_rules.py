"""Rules for the tangents of kernels, which are those of blockwise attention."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.implementations.blockwise import Blockwise
from attention.implementations.blockwise import derivative as blockwise
from attention.implementations.blockwise.problem import (
  Captured,
  Problem,
  TileOptions,
  make_problem,
  trace_pair,
)
from attention.implementations.blockwise.rows import compute_rows
from attention.implementations.blockwise.tiles import Tiling, with_length
from attention.implementations.closure import Program, without_captured
from attention.implementations.pallas.normalizers import Sparse
from attention.implementations.pallas.results import Results
from attention.request import Request
from attention.softmax import Statistics


class Arguments(NamedTuple):
  """The arrays of a call; the rule captured some, and kernels read others."""

  captured: Captured
  operands: list[jax.Array]
  tokens: list[jax.Array]  # the mapped query and key, and the value

  @property
  def linear(self) -> list[Any]:
    """The arrays, or tangents, of which the result is differentiable."""
    return [*self.captured.pair, *self.captured.bias, *self.tokens]

  def with_linear(self, chosen: Sequence[int], arrays) -> "Arguments":
    """The arguments with other arrays at these places of `linear`."""
    values = self.linear
    for place, array in zip(chosen, arrays):
      values[place] = array
    first, second = len(self.captured.pair), len(values) - 3
    captured = self.captured._replace(
      pair=values[:first], bias=values[first:second]
    )
    return self._replace(captured=captured, tokens=values[second:])


class OnlineRule(NamedTuple):
  """The blockwise rule."""

  problem: Problem  # with tiles of its own

  def __call__(
    self, arguments: Arguments, results: Results
  ) -> tuple[jax.Array, jax.Array]:
    """The results' context and total, with the derivatives of the rule."""
    tiling, dtype = self.problem.tiling, self.problem.dtype
    context, statistics, _ = results
    length = context.shape[-2]

    def rows_padded(array):
      missing = tiling.query_length - length
      return jnp.pad(array, after(len(tiling.leading), missing, array.ndim))

    of_context, (_, of_total) = blockwise.differentiable_context(
      self.problem,
      arguments.captured,
      *padded(arguments.tokens, tiling.query_length, tiling.key_length),
      combined=(
        rows_padded(context.astype(dtype)),
        Statistics(*map(rows_padded, statistics)),
      ),
    )
    return of_context[..., :length, :], of_total[..., :length]


class RowsRule(NamedTuple):
  """JAX's derivatives of `blockwise.rows`, which needs no results."""

  program: Program  # (captured, query, key, value) -> context
  tiling: Tiling

  def __call__(
    self, arguments: Arguments, results: Results
  ) -> tuple[jax.Array, jax.Array]:
    """The context, and totals without derivatives."""
    tiling, length = self.tiling, results.context.shape[-2]
    context = self.program(
      arguments.captured.pair,
      *padded(arguments.tokens, tiling.query_length, tiling.key_length),
    )
    return context[..., :length, :], results.statistics.total


def make_rule(
  request: Request, tokens: Sequence[jax.Array]
) -> tuple[OnlineRule | RowsRule, Captured]:
  """The rule of a request, for mapped tokens, and the arrays it captured."""
  own = request.normalizer
  if isinstance(own, Sparse):
    request = dataclasses.replace(request, normalizer=own.normalizer)
  tiling = Blockwise().tiling(request)
  query, key, value = padded(tokens, tiling.query_length, tiling.key_length)
  if isinstance(own, Sparse):
    program, arrays = without_captured(
      lambda *tokens: compute_rows(request, tiling, None, *tokens)[0],
      *(query, key, value),
    )
    return RowsRule(program, tiling), Captured(arrays, [], [], [], [])
  pair, tiling = trace_pair(request, query, key, tiling, [request.leading])
  problem, captured = make_problem(
    pair, TileOptions(tiling, request), request.leading
  )
  return OnlineRule(problem), captured


def padded(tokens: Sequence[Any], queries: int, keys: int) -> list[Any]:
  """The query, the key and the value, up to these lengths."""
  query, key, value = tokens
  return [
    with_length(query, queries),
    with_length(key, keys),
    with_length(value, keys, "constant"),
  ]


def after(axis: int, missing: int, rank: int) -> list[tuple[int, int]]:
  """Widths of a padding after the last entry of one axis."""
  return [(0, missing if number == axis else 0) for number in range(rank)]
