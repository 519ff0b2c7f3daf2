"""Calls of the kernels, with the arrays that these read and write."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from attention.implementations.pallas.functions import Rules
from attention.implementations.pallas.operands import Operand, summed
from attention.implementations.pallas.products import matrix_product
from attention.implementations.pallas.tile_functions import TileFunctions
from attention.implementations.pallas.tpu import gradient, gradient_rows, whole
from attention.implementations.pallas.tpu.forward import online_softmax
from attention.implementations.pallas.tpu.grid import (
  TileGrid,
  inputs_of,
  row_inputs,
)
from attention.implementations.pallas.tpu.tokens import is_transposed
from attention.implementations.pallas.tpu.visit import rules
from attention.implementations.pallas.visits import Visibility
from attention.softmax import Statistics


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
  """What the kernels of one call share."""

  leading: tuple[int, ...]
  tile: tuple[int, int]
  chunk: int  # the queries of which scores are computed at once
  functions: TileFunctions  # of a chunk of queries and a tile of keys
  visibility: Visibility
  dtype: Any  # of the statistics
  precision: jax.lax.Precision  # of products with values
  # Whether keys may be hidden. NaN in a hidden token then changes nothing, and
  # the rows that attend to NaN become NaN, without derivatives.
  is_masked: bool
  interpret: Any
  has_gradients: ClassVar[bool] = True

  @property
  def score_operands(self) -> Sequence[Operand]:
    """The arrays that the score reads."""
    return self.functions.pair.operands

  @property
  def arrays(self) -> list[jax.Array]:
    """The arrays of all operands."""
    return [each.array for each in self.functions.operands]

  @property
  def rules(self) -> Rules:
    """How the kernels evaluate the functions."""
    return rules(self.interpret)

  @property
  def padded_lengths(self) -> tuple[int, int]:
    """T and S, rounded up to tiles."""
    rows, columns = self.visibility.tiles.shape
    return rows * self.tile[0], columns * self.tile[1]

  def finite(self, tokens: jax.Array) -> jax.Array:
    """Zero for NaN and infinity, if keys may be hidden."""
    return self.of_finite(tokens, tokens)

  def of_finite(self, tokens: jax.Array, numbers: jax.Array) -> jax.Array:
    """Numbers with zero where tokens are not finite, if keys may be hidden."""
    if not self.is_masked:
      return numbers
    tokens, wide = (
      each.astype(jnp.promote_types(each.dtype, jnp.float32))
      for each in (tokens, numbers)
    )
    return jnp.where(jnp.isfinite(tokens), wide, 0.0).astype(numbers.dtype)

  def product(self, left, right, axes: tuple[int, int], dtype) -> jax.Array:
    """The product of two matrices of numbers that are rounded to a dtype."""
    dtypes = (dtype, dtype)
    return matrix_product(
      left, right, axes, dtypes, self.precision, self.rules.is_interpreted
    )

  def forward(
    self, operands: Sequence[jax.Array], tokens: Sequence[jax.Array]
  ) -> tuple[jax.Array, Statistics]:
    """The context, in the query's dtype, and the statistics."""
    query, key, value = tokens
    size = value.shape[-1]
    grid = TileGrid(self, self.visibility.by_rows(), ())
    lengths = self.padded_lengths
    outputs = [
      grid.tokens((*self.leading, lengths[0], size), 0),
      grid.statistics(lengths[0]),
      grid.statistics(lengths[0]),
    ]
    queries = self.tile[0]
    context, maximum, total = grid.call(
      functools.partial(online_softmax, self),
      inputs_of(self, grid, operands, query, key, value),
      outputs,
      [query.dtype, self.dtype, self.dtype],
      [(queries, 1), (queries, 1), (queries, size), (queries, 2)],
    )
    context = _restored(context, size)
    return context, Statistics(maximum[..., 0, :], total[..., 0, :])

  def gradients(
    self, operands, tokens, rows, wanted: Sequence[int], *, of_keys: bool
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients of tokens, and of the wanted operands of the score.

    Without `of_keys` the first are those of the queries only.
    """
    # The kernel of keys reads rows that the other completes, which runs in any
    # case.
    of_query, of_operands, for_keys = self._of_queries(
      operands, tokens, rows, wanted
    )
    of_tokens = [of_query]
    if of_keys:
      of_tokens += self._of_keys(operands, tokens, for_keys)
    return of_tokens, [
      summed(each, self.score_operands[number], self.leading)
      for number, each in zip(wanted, of_operands)
    ]

  def _of_queries(
    self, operands, tokens, rows, wanted: Sequence[int]
  ) -> tuple[jax.Array, list[jax.Array], dict[str, jax.Array]]:
    """The gradients of queries and of wanted operands, and rows for keys."""
    # That of queries has all leading axes of the context.
    query = tokens[0]
    grid = TileGrid(self, self.visibility.by_rows(), ())
    operands_of = [self.score_operands[number] for number in wanted]
    shape = (*self.leading, *query.shape[-2:])
    names = gradient_rows.names(self.is_masked)
    results = grid.call(
      functools.partial(gradient.of_queries, self, wanted, [*rows]),
      inputs_of(self, grid, operands, *tokens)
      + row_inputs(grid, [*rows.values()]),
      [
        grid.tokens(shape, 0),
        *map(grid.gradient, operands_of),
        *[grid.statistics(shape[-2])] * len(names),
      ],
      [_sum_dtype(self, query)] + [self.dtype] * (len(wanted) + len(names)),
      [(self.tile[0], query.shape[-1]), (self.tile[0], len(names))],
      kept_axes=min(map(whole.kept_axes, operands_of), default=None),
    )
    of_operands = results[1 : 1 + len(wanted)]
    made = {
      name: each[..., 0, :] for name, each in zip(names, results[-len(names) :])
    }
    return (
      _restored(results[0], query.shape[-1]),
      [*map(whole.restored, of_operands, operands_of)],
      made | {"cotangent": rows["cotangent"]},
    )

  def _of_keys(self, operands, tokens, rows) -> tuple[jax.Array, jax.Array]:
    """The gradients of the keys and the values."""
    # They have the leading axes of the context, of size 1 where neither keys
    # nor values have the axis.
    _, key, value = tokens
    shared = tuple(
      axis
      for axis, size in enumerate(self.leading)
      if size > 1 and key.shape[axis] == value.shape[axis] == 1
    )
    groups = math.prod(self.leading[axis] for axis in shared)
    grid = TileGrid(self, self.visibility.by_columns(groups), shared)
    leading = [
      1 if axis in shared else n for axis, n in enumerate(self.leading)
    ]
    shapes = [(*leading, *each.shape[-2:]) for each in (key, value)]
    of_key, of_value = grid.call(
      functools.partial(gradient.of_keys, self),
      inputs_of(self, grid, operands, *tokens)
      + row_inputs(grid, [*rows.values()]),
      [grid.tokens(shape, 1) for shape in shapes],
      [_sum_dtype(self, each, leading) for each in (key, value)],
      [(self.tile[1], each.shape[-1]) for each in (key, value)],
    )
    return _restored(of_key, key.shape[-1]), _restored(
      of_value, value.shape[-1]
    )


def _restored(stored: jax.Array, features: int) -> jax.Array:
  """Tokens [..., T, D] that a kernel has written."""
  return stored.mT if is_transposed(features) else stored


def _sum_dtype(problem, tokens, leading=None):
  """The dtype of a gradient; that of sums if it is summed over leading axes."""
  leading = problem.leading if leading is None else tuple(leading)
  return tokens.dtype if tokens.shape[:-2] == leading else problem.dtype
