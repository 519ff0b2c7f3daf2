"""Calls of the kernels, with the arrays that these read and write."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from attention.arrays.softmax import Statistics
from attention.implementations.pallas.normalizers import Sparse
from attention.implementations.pallas.operands import Operand, split, summed
from attention.implementations.pallas.products import matrix_product
from attention.implementations.pallas.results import Results
from attention.implementations.pallas.tpu import gradient, gradient_rows, whole
from attention.implementations.pallas.tpu.forward import online_softmax
from attention.implementations.pallas.tpu.grid import TileGrid, inputs_of
from attention.implementations.pallas.tpu.sparse import sparse_context
from attention.implementations.pallas.tpu.sums import (
  is_whole,
  kernel_of,
  restored,
  scratch_shape,
)
from attention.implementations.pallas.tpu.tile_functions import TileFunctions
from attention.implementations.pallas.tpu.tokens import is_transposed
from attention.implementations.pallas.visits import Visibility
from attention.normalizers import OnlineNormalizer


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
  """What the kernels of one call share."""

  leading: tuple[int, ...]
  tile: tuple[int, int]
  chunk: int  # the queries of which scores are computed at once
  functions: TileFunctions  # of a chunk of queries and a tile of keys
  visibility: Visibility
  normalizer: OnlineNormalizer  # without arrays
  dtype: Any  # of the statistics
  precision: jax.lax.Precision  # of products with values
  # Whether keys may be hidden. NaN in a hidden token then changes nothing, and
  # the rows that attend to NaN become NaN, without derivatives.
  is_masked: bool
  bias_may_hide: bool  # whether a number of the bias may be -inf
  interpret: Any
  has_gradients: ClassVar[bool] = True

  @property
  def differentiable_operands(self) -> Sequence[Operand]:
    """The arrays of which the kernels compute gradients, and some others."""
    pair, bias, *_ = self.functions
    return [*pair.operands, *([] if bias is None else bias.operands)]

  def operands_of(self, numbers: Sequence[int]) -> list[Operand]:
    """The operands of these numbers."""
    return [self.functions.operands[number] for number in numbers]

  @property
  def arrays(self) -> list[jax.Array]:
    """The arrays of all operands."""
    return [each.array for each in self.functions.operands]

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
      left, right, axes, dtypes, self.precision, bool(self.interpret)
    )

  def forward(
    self,
    operands: Sequence[jax.Array],
    tokens: Sequence[jax.Array],
    *,
    for_gradients: bool,
  ) -> Results:
    """The context, in the query's dtype, and what the gradients need."""
    query, value = tokens[0], tokens[-1]
    is_sparse = isinstance(self.normalizer, Sparse)
    grid = TileGrid(self, self.visibility.by_rows(1 + is_sparse), ())
    lengths, size = self.padded_lengths, value.shape[-1]
    of_tokens = grid.tokens((*self.leading, lengths[0], size), 0)
    of_rows = grid.statistics
    queries, keys = self.tile
    row, sums = (queries, 1), (queries, size)
    scratch: list[Any] = [row, row, (queries, 2), sums]
    kernel, count = online_softmax, 1
    if is_sparse:
      kernel, count = sparse_context, 1 + for_gradients
      rows = (self.visibility.most_in_a_row, queries, keys)
      place = pltpu.SMEM((1,), jnp.int32)
      scratch = [rows, place, *scratch, *[sums] * (count - 1)]
    *results, maximum, total = grid.call(
      kernel,
      inputs_of(grid, operands, tokens, {}),
      [*[of_tokens] * count, of_rows, of_rows],
      [query.dtype] * count + [self.dtype] * 2,
      scratch,
    )
    context, *means = (_restored(each, size) for each in results)
    statistics = Statistics(maximum[..., 0, :], total[..., 0, :])
    return Results(context, statistics, *means)

  def gradients(
    self, operands, tokens, rows, wanted: Sequence[int], *, of_keys: bool
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """The gradients of tokens, and of the wanted operands.

    Without `of_keys` the first are those of the queries only.
    """
    # The kernel of keys reads rows that the other completes, which runs in any
    # case.
    of_queries, of_keys_too, of_pairs = (
      [n for n in wanted if kernel_of(self.functions.operands[n]) == kernel]
      for kernel in ("queries", "keys", "pairs")
    )
    of_query, found, for_keys = self._of_queries(
      operands, tokens, rows, of_queries
    )
    of_tokens = [of_query]
    if of_keys or of_keys_too:
      more, also_found = self._of_keys(operands, tokens, for_keys, of_keys_too)
      of_tokens += more
      found |= also_found
    for n in of_pairs:
      found[n] = self._of_pairs(operands, tokens, for_keys, n)
    return of_tokens, [
      summed(found[n], self.functions.operands[n], self.leading) for n in wanted
    ]

  def _of_pairs(self, operands, tokens, rows, wanted: int) -> jax.Array:
    """The gradient of a wanted array of pairs, [leading..., T, S]."""
    # Visits run over the leading axes whose entries share the array.
    operand = self.functions.operands[wanted]
    every = range(len(self.leading))
    shared = tuple(axis for axis in every if axis not in operand.axes)
    groups = math.prod(self.leading[axis] for axis in shared)
    grid = TileGrid(self, self.visibility.by_tiles(groups), shared)
    (result,) = grid.call(
      functools.partial(gradient.of_pairs, [wanted]),
      inputs_of(grid, operands, tokens, rows),
      [grid.gradient(operand)],
      [operand.array.dtype],
      [self.tile],
    )
    return result

  def _of_queries(
    self, operands, tokens, rows, wanted: Sequence[int]
  ) -> tuple[jax.Array, dict[int, jax.Array], dict[str, jax.Array]]:
    """The gradients of queries and of wanted operands, and rows for keys."""
    # That of queries has all leading axes of the context.
    query = tokens[0]
    grid = TileGrid(self, self.visibility.by_rows(), ())
    shape = (*self.leading, *query.shape[-2:])
    names = gradient_rows.names(self.is_masked)
    results = self._gradient_call(
      functools.partial(gradient.of_queries, wanted, [*rows]),
      grid,
      inputs_of(grid, operands, tokens, rows),
      [(grid.tokens(shape, 0), _sum_dtype(self, query))],
      [(self.tile[0], query.shape[-1]), (self.tile[0], len(names))],
      wanted,
      [(grid.statistics, self.dtype)] * len(names),
    )
    of_query, of_operands, made = results
    found = dict(zip(names, (each[..., 0, :] for each in made)))
    return (
      _restored(of_query[0], query.shape[-1]),
      of_operands,
      found | {"cotangent": rows["cotangent"]},
    )

  def _of_keys(
    self, operands, tokens, rows, wanted: Sequence[int]
  ) -> tuple[list[jax.Array], dict[int, jax.Array]]:
    """The gradients of the keys and the values, and of wanted operands."""
    # They have the leading axes of the context, of size 1 where the visits add
    # those of all entries that share keys, or values.
    _, key, value = tokens
    shared_by = [self._shared(each, wanted) for each in (key, value)]
    shared = tuple(sorted(_axes_of_groups(*shared_by)))
    are_shared = [{*shared} <= each for each in shared_by]
    groups = math.prod(self.leading[axis] for axis in shared)
    grid = TileGrid(self, self.visibility.by_columns(groups), shared)
    sizes = [
      grid.sizes if is_shared else [*self.leading] for is_shared in are_shared
    ]
    own = [
      (
        grid.tokens((*leading, *each.shape[-2:]), 1),
        _sum_dtype(self, each, leading),
      )
      for each, leading in zip((key, value), sizes)
    ]
    of_tokens, of_operands, _ = self._gradient_call(
      functools.partial(gradient.of_keys, wanted, are_shared),
      grid,
      inputs_of(grid, operands, tokens, rows),
      own,
      [(self.tile[1], each.shape[-1]) for each in (key, value)],
      wanted,
    )
    return [
      _restored(gradient, each.shape[-1])
      for gradient, each in zip(of_tokens, (key, value))
    ], of_operands

  def _shared(self, tokens: jax.Array, wanted: Sequence[int]) -> set[int]:
    """The leading axes whose entries share tokens, and no wanted operand."""
    of_operands = {
      axis for each in self.operands_of(wanted) for axis in each.axes
    }
    return {
      axis
      for axis, size in enumerate(self.leading)
      if size > 1 and tokens.shape[axis] == 1 and axis not in of_operands
    }

  def _gradient_call(
    self, kernel, grid, inputs, outputs, scratch, wanted, others=()
  ) -> tuple[list[jax.Array], dict[int, jax.Array], list[jax.Array]]:
    """The outputs of a kernel, the gradients of operands, and other outputs."""
    operands = self.operands_of(wanted)
    of_operands = [(grid.gradient(each), self.dtype) for each in operands]
    shapes = [scratch_shape(each, self.tile) for each in operands]
    specs, dtypes = zip(*outputs, *of_operands, *others)
    results = grid.call(
      kernel,
      inputs,
      specs,
      dtypes,
      scratch + [each for each in shapes if each is not None],
      kept_axes=min(
        map(whole.kept_axes, filter(is_whole, operands)), default=None
      ),
    )
    tokens, gradients, rest = split(results, [len(outputs), len(wanted)])
    found = map(restored, gradients, operands)
    return [*tokens], dict(zip(wanted, found)), [*rest]


def _axes_of_groups(first: set[int], second: set[int]) -> set[int]:
  """The axes that visits run over, of those that keys and values share."""
  # The visits of a tile follow one another, so that its sum is one.
  if first and second:
    return first if first == second else first & second
  return first | second


def _restored(stored: jax.Array, features: int) -> jax.Array:
  """Tokens [..., T, D] that a kernel has written."""
  return stored.mT if is_transposed(features) else stored


def _sum_dtype(problem, tokens, leading=None):
  """The dtype of a gradient; that of sums if it is summed over leading axes."""
  leading = problem.leading if leading is None else tuple(leading)
  return tokens.dtype if tokens.shape[:-2] == leading else problem.dtype
