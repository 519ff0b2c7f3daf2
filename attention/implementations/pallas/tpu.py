"""Kernels for TPUs.

The grid has the leading axes of the context, one entry each, and then the
visits of tiles. A kernel holds a tile of queries or of keys, its sums stay in
VMEM from its first visit to its last, and Pallas loads the other tiles.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attention.implementations.pallas.functions import matrix_product
from attention.implementations.pallas.operands import Kind, Operand
from attention.implementations.pallas.tile_functions import TileFunctions
from attention.implementations.pallas.tpu_additive import weighted_tanh_sum
from attention.implementations.pallas.visits import (
  FIRST,
  HIDDEN,
  LAST,
  MASKED,
  Visibility,
  Visits,
  unpacked,
)
from attention.softmax import Statistics

RULES = {"weighted_tanh_sum": weighted_tanh_sum}
_LANES = 128
_VMEM = 64 << 20


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
  def padded_lengths(self) -> tuple[int, int]:
    """T and S, rounded up to tiles."""
    rows, columns = self.visibility.tiles.shape
    return rows * self.tile[0], columns * self.tile[1]

  def finite(self, tokens: jax.Array) -> jax.Array:
    """Zero for NaN and infinity, if keys may be hidden."""
    if not self.is_masked:
      return tokens
    wide = tokens.astype(jnp.promote_types(tokens.dtype, jnp.float32))
    return jnp.where(jnp.isfinite(wide), wide, 0.0).astype(tokens.dtype)

  def forward(
    self, operands: Sequence[jax.Array], query, key, value
  ) -> tuple[jax.Array, Statistics]:
    """The context, in the query's dtype, and the statistics."""
    size = value.shape[-1]
    walk = _Walk(self, self.visibility.by_rows(), ())
    lengths = self.padded_lengths
    outputs = [
      walk.tokens((*self.leading, lengths[0], size), 0),
      walk.statistics(lengths[0]),
      walk.statistics(lengths[0]),
    ]
    queries = self.tile[0]
    context, maximum, total = walk.call(
      functools.partial(_forward, self),
      _inputs(self, walk, operands, query, key, value),
      outputs,
      [query.dtype, self.dtype, self.dtype],
      [(queries, 1), (queries, 1), (queries, size), (queries, 2)],
    )
    return context, Statistics(maximum[..., 0, :], total[..., 0, :])

  def gradient_of_queries(
    self, operands, tokens, rows, cotangent, wanted: Sequence[int]
  ) -> tuple[jax.Array, list[jax.Array]]:
    """The gradients of the queries and of the wanted operands of the score.

    `rows` are the maximum, the total and the mean of the weights' cotangents of
    each row, [..., T]. The gradients have all leading axes of the context.
    """
    query = tokens[0]
    walk = _Walk(self, self.visibility.by_rows(), ())
    cores = [_core_2d(self.functions.pair.operands[n]) for n in wanted]
    shape = (*self.leading, *query.shape[-2:])
    gradient, *of_operands = walk.call(
      functools.partial(_gradient_of_queries, self, wanted),
      _inputs(self, walk, operands, *tokens)
      + _row_inputs(self, walk, rows, cotangent),
      [walk.tokens(shape, 0), *(walk.whole(core) for core in cores)],
      [_sum_dtype(self, query)] + [self.dtype] * len(cores),
      [(self.tile[0], query.shape[-1])],
    )
    return gradient, [
      each[..., 0, 0] if not core else each.reshape(*self.leading, *core)
      for each, core in zip(
        of_operands, (self.functions.pair.operands[n].core for n in wanted)
      )
    ]

  def gradient_of_keys(
    self, operands, tokens, rows, cotangent
  ) -> tuple[jax.Array, jax.Array]:
    """The gradients of the keys and the values.

    They have the leading axes of the context, of size 1 where neither keys nor
    values have the axis.
    """
    _, key, value = tokens
    shared = tuple(
      axis
      for axis, size in enumerate(self.leading)
      if size > 1 and key.shape[axis] == value.shape[axis] == 1
    )
    groups = math.prod(self.leading[axis] for axis in shared)
    walk = _Walk(self, self.visibility.by_columns(groups), shared)
    leading = [
      1 if axis in shared else n for axis, n in enumerate(self.leading)
    ]
    shapes = [(*leading, *each.shape[-2:]) for each in (key, value)]
    of_key, of_value = walk.call(
      functools.partial(_gradient_of_keys, self),
      _inputs(self, walk, operands, *tokens)
      + _row_inputs(self, walk, rows, cotangent),
      [walk.tokens(shape, 1) for shape in shapes],
      [_sum_dtype(self, each, leading) for each in (key, value)],
      [(self.tile[1], each.shape[-1]) for each in (key, value)],
    )
    return of_key, of_value


def _forward(problem, visit, inputs, outputs, scratch):
  """One visit of a tile: the online softmax."""
  query_ref, key_ref, value_ref, *operand_refs = inputs
  maximum, total, summed, spoilt = scratch

  @pl.when(visit.has(FIRST))
  def _():
    spoilt[...] = jnp.zeros_like(spoilt)
    maximum[...] = jnp.full_like(maximum, jnp.finfo(problem.dtype).min)
    total[...] = jnp.zeros_like(total)
    summed[...] = jnp.zeros_like(summed)

  def update(masked):
    key, value = (problem.finite(ref[...]) for ref in (key_ref, value_ref))
    parts = visit.parts(problem, operand_refs)
    for rows in visit.chunks(problem):
      query = problem.finite(query_ref[rows, :])
      scores, _ = visit.scores(problem, query, key, parts, rows, masked)
      if problem.is_masked:
        _note_non_finite(scores, key_ref[...], value_ref[...], spoilt, rows)
      before = maximum[rows, :]
      after = jnp.maximum(before, jnp.max(scores, axis=-1, keepdims=True))
      shrink = jnp.exp(before - after)
      weights = jnp.exp(scores - after)
      maximum[rows, :] = after
      total[rows, :] = total[rows, :] * shrink + jnp.sum(
        weights, axis=-1, keepdims=True
      )
      types = (value.dtype, value.dtype)
      product = matrix_product(weights, value, (1, 0), types, problem.precision)
      summed[rows, :] = summed[rows, :] * shrink + product

  visit.either(problem, update)

  @pl.when(visit.has(LAST))
  def _():
    context_ref, maximum_ref, total_ref = outputs
    divisor = jnp.where(total[...] == 0.0, 1.0, total[...])
    context, rows = summed[...] / divisor, [maximum[...], total[...]]
    if problem.is_masked:
      bad = _has_non_finite(query_ref[...]) * (total[...] != 0.0)
      of_rows = jnp.maximum(spoilt[:, :1], bad)
      rows = [jnp.where(of_rows > 0.0, jnp.nan, each) for each in rows]
      of_context = jnp.maximum(spoilt[:, 1:], of_rows)
      context = jnp.where(of_context > 0.0, jnp.nan, context)
    context_ref[...] = context.astype(context_ref.dtype)
    maximum_ref[...], total_ref[...] = map(_as_row, rows)


def _note_non_finite(scores, key, value, spoilt, rows):
  """Marks rows that attend to keys or values with NaN or infinity."""
  bad = [_has_non_finite(each) for each in (key, value)]

  @pl.when(jnp.max(jnp.maximum(*bad)) > 0.0)
  def _():
    visible = jnp.where(jnp.isneginf(scores), 0.0, 1.0)
    seen = [
      jnp.max(visible * _as_row(each), axis=-1, keepdims=True) for each in bad
    ]
    spoilt[rows, :] = jnp.maximum(
      spoilt[rows, :], jnp.concatenate(seen, axis=-1)
    )


def _has_non_finite(tokens: jax.Array) -> jax.Array:
  """1 for tokens [n, D] with NaN or infinity and 0 for others, [n, 1]."""
  dtype = jnp.promote_types(tokens.dtype, jnp.float32)
  bad = jnp.where(jnp.isfinite(tokens.astype(dtype)), 0.0, 1.0).astype(dtype)
  return jnp.max(bad, axis=-1, keepdims=True)


def _gradient_of_queries(problem, wanted, visit, inputs, outputs, scratch):
  """One visit of a tile of keys."""
  query_ref, key_ref, value_ref, *rest = inputs
  operand_refs, row_refs = rest[:-4], rest[-4:]
  summed = scratch[0]
  gradient_ref, *of_operands = outputs

  @pl.when(visit.has(FIRST))
  def _():
    summed[...] = jnp.zeros_like(summed)

  @pl.when(visit.number == 0)
  def _():
    for each in of_operands:
      each[...] = jnp.zeros_like(each)

  def update(masked):
    key, value = (problem.finite(ref[...]) for ref in (key_ref, value_ref))
    parts = visit.parts(problem, operand_refs)
    of_rows = visit.rows(problem, row_refs)
    for rows in visit.chunks(problem):
      query = problem.finite(query_ref[rows, :])
      scores, pull_back = visit.scores(
        problem, query, key, parts, rows, masked, wanted=wanted
      )
      _, of_scores, _ = visit.weights(problem, scores, value, of_rows, rows)
      of_query, of_parts = pull_back(of_scores)
      summed[rows, :] += of_query
      for each, part in zip(of_operands, of_parts):
        each[...] += jnp.broadcast_to(
          part.reshape(part.shape if part.ndim > 1 else (1, -1)), each.shape
        )

  visit.either(problem, update)

  @pl.when(visit.has(LAST))
  def _():
    gradient_ref[...] = summed[...].astype(gradient_ref.dtype)


def _gradient_of_keys(problem, visit, inputs, outputs, scratch):
  """One visit of a tile of queries."""
  query_ref, key_ref, value_ref, *rest = inputs
  operand_refs, row_refs = rest[:-4], rest[-4:]

  @pl.when(visit.has(FIRST))
  def _():
    for each in scratch:
      each[...] = jnp.zeros_like(each)

  def update(masked):
    key, value = (problem.finite(ref[...]) for ref in (key_ref, value_ref))
    parts = visit.parts(problem, operand_refs)
    of_rows = visit.rows(problem, row_refs)
    for rows in visit.chunks(problem):
      query = problem.finite(query_ref[rows, :])
      scores, pull_back = visit.scores(
        problem, query, key, parts, rows, masked, of_keys=True
      )
      weights, of_scores, cotangent = visit.weights(
        problem, scores, value, of_rows, rows
      )
      types = (value.dtype, value.dtype)
      scratch[0][...] += pull_back(of_scores)[0]
      scratch[1][...] += matrix_product(
        weights, cotangent, (0, 0), types, problem.precision
      )

  visit.either(problem, update)

  @pl.when(visit.has(LAST))
  def _():
    for output, each in zip(outputs, scratch):
      output[...] = each[...].astype(output.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class _Visit:
  """The tile that an instance of a kernel computes."""

  number: Any
  indices: tuple[Any, ...]
  row: Any
  column: Any
  flags: Any

  def has(self, flag: int):
    return (self.flags & flag) != 0

  def either(self, problem, update: Callable[[bool], None]) -> None:
    """Calls `update` with whether the tile needs the mask, unless hidden."""
    if problem.functions.visible is None:
      pl.when(~self.has(HIDDEN))(lambda: update(False))
      return
    pl.when((self.flags & (HIDDEN | MASKED)) == 0)(lambda: update(False))
    pl.when((self.flags & (HIDDEN | MASKED)) == MASKED)(lambda: update(True))

  def chunks(self, problem) -> list[slice]:
    """The rows of the tile, in chunks."""
    queries, size = problem.tile[0], problem.chunk
    return [slice(n, n + size) for n in range(0, queries, size)]

  def parts(self, problem, refs) -> list[jax.Array]:
    """The parts of all operands for this tile."""
    parts = []
    for operand, ref in zip(problem.functions.operands, refs, strict=True):
      if operand.kind is Kind.SCALAR:
        flat = jnp.int32(0)
        for axis, size in zip(operand.axes, operand.array.shape):
          flat = flat * size + (0 if axis is None else self.indices[axis])
        parts.append(ref[flat])
      elif operand.kind is Kind.COLUMN:
        parts.append(_as_column(ref[...]))
      elif operand.kind is Kind.WHOLE:
        parts.append(ref[...].reshape(operand.core))
      else:
        parts.append(ref[...])
    return parts

  def scores(
    self, problem, query, key, parts, rows, masked, wanted=None, of_keys=False
  ):
    """Scores [r, s] of a chunk of queries, and the function of their gradients.

    The gradients are those of the query and the `wanted` parts of the score, or
    of the key.
    """
    pull_back = None
    queries, keys = problem.tile
    where = (
      self.row * queries + rows.start,
      self.column * keys,
      *self.indices,
    )
    chunked = [
      part[rows, :] if operand.kind in (Kind.COLUMN, Kind.TILE) else part
      for operand, part in zip(problem.functions.operands, parts)
    ]
    of_pair, of_bias, of_visible = problem.functions.split(chunked)
    query, key = (
      each.astype(jnp.promote_types(each.dtype, jnp.float32))
      for each in (query, key)
    )
    pair = functools.partial(problem.functions.pair, RULES)
    if of_keys:
      scores, pull_back = jax.vjp(
        lambda key: pair((query, key, *where), of_pair), key
      )
    elif wanted is not None:

      def of_query(query, some):
        own = list(of_pair)
        for n, part in zip(wanted, some):
          own[n] = part
        return pair((query, key, *where), own)

      some = [of_pair[n] for n in wanted]
      scores, pull_back = jax.vjp(of_query, query, some)
    else:
      scores = pair((query, key, *where), of_pair)
    scores = scores.astype(problem.dtype)
    if problem.functions.bias is not None:
      bias = problem.functions.bias(RULES, where, of_bias)
      scores = scores + bias.astype(problem.dtype)
    if masked:
      visible = problem.functions.visible(RULES, where, of_visible)
      scores = jnp.where(visible, scores, -jnp.inf)
    return scores, pull_back

  def rows(self, problem, refs):
    """Maximum, inverse total and mean cotangent [t, 1]; cotangents [t, E]."""
    maximum, total, mean = (_as_column(ref[...]) for ref in refs[:3])
    cotangent = refs[3][...]
    if problem.is_masked:  # a mark of rows that are NaN
      spoilt = total < 0.0
      cotangent = jnp.where(spoilt, jnp.zeros_like(cotangent), cotangent)
    empty = total == 0.0
    inverse = jnp.where(empty, 0.0, 1.0 / jnp.where(empty, 1.0, abs(total)))
    return maximum, inverse, mean, cotangent

  def weights(self, problem, scores, value, of_rows, rows):
    """The weights, the cotangents of the scores and those of the context."""
    maximum, inverse, mean, cotangent = (each[rows, :] for each in of_rows)
    exponents = jnp.minimum(scores - maximum, 0.0)
    weights = jnp.exp(exponents) * inverse
    types = (value.dtype, value.dtype)
    of_weights = matrix_product(
      cotangent, value, (1, 1), types, problem.precision
    )
    return weights, weights * (of_weights - mean), cotangent


@dataclasses.dataclass(frozen=True, eq=False)
class _Walk:
  """A grid, and the blocks of arrays at its points."""

  problem: Problem
  visits: Visits
  shared: tuple[int, ...]  # leading axes that the visits run over

  @property
  def _own(self) -> list[int]:
    """The leading axes of the grid."""
    return [n for n in range(len(self.problem.leading)) if n not in self.shared]

  def _place(self, grid, tiles, groups=None) -> _Visit:
    """The visit at a point of the grid."""
    *own, number = grid
    indices: dict[int, Any] = dict(zip(self._own, own))
    group = 0 if groups is None else groups[number]
    for axis in reversed(self.shared):
      size = self.problem.leading[axis]
      indices[axis] = jax.lax.rem(group, jnp.int32(size))
      group = jax.lax.div(group, jnp.int32(size))
    return _Visit(
      number,
      tuple(indices[n] for n in range(len(self.problem.leading))),
      *unpacked(tiles[number]),
    )

  def _spec(self, block, index: Callable[[_Visit], tuple]) -> pl.BlockSpec:
    count = len(self._own) + 1
    return pl.BlockSpec(
      block, lambda *ids: index(self._place(ids[:count], *ids[count:]))
    )

  def tokens(self, shape, axis: int):
    """The shape and blocks of tokens [..., n, D]; axis 0 is that of rows."""
    sizes = shape[:-2]

    def index(visit):
      leading = _of_sizes(visit.indices, sizes)
      return (*leading, (visit.row, visit.column)[axis], 0)

    block = (*[None] * len(sizes), self.problem.tile[axis], shape[-1])
    return shape, self._spec(block, index)

  def statistics(self, length: int):
    """The shape and the blocks of an array [..., 1, T]."""
    leading = self.problem.leading
    block = (*[None] * len(leading), 1, self.problem.tile[0])
    return (*leading, 1, length), self._spec(
      block, lambda visit: (*visit.indices, 0, visit.row)
    )

  def whole(self, core):
    """The shape and the blocks of an array [..., core] of the context."""
    leading = self.problem.leading
    zeros = (0,) * len(core)
    return (*leading, *core), self._spec(
      (*[None] * len(leading), *core), lambda visit: (*visit.indices, *zeros)
    )

  def operand(self, operand: Operand, array: jax.Array):
    """An operand as the kernel reads it, and its blocks."""
    array = _readable(array)
    number, (queries, keys) = len(operand.axes), self.problem.tile
    lengths = self.problem.padded_lengths
    leading, core = array.shape[:number], array.shape[number:]
    if operand.kind is Kind.SCALAR:
      return array.reshape(-1), pl.BlockSpec(memory_space=pltpu.SMEM)

    def index(visit, *last):
      return (
        *(0 if axis is None else visit.indices[axis] for axis in operand.axes),
        *last,
      )

    if operand.kind is Kind.WHOLE:
      core = _core_2d(operand)
      array, zeros = array.reshape(*leading, *core), (0,) * len(core)
      block, at = core, lambda visit: index(visit, *zeros)
    elif operand.kind is Kind.COLUMN:
      array = _lengthened(array, -1, lengths[0])[..., None, :]
      block, at = (1, queries), lambda visit: index(visit, 0, visit.row)
    elif operand.kind is Kind.ROW:
      array = _lengthened(array, -1, lengths[1])[..., None, :]
      block, at = (1, keys), lambda visit: index(visit, 0, visit.column)
    else:
      array = _lengthened(array, -2, lengths[0])
      array = _lengthened(array, -1, lengths[1])
      block = (queries, keys)

      def at(visit):
        return index(visit, visit.row, visit.column)

    return array, self._spec((*[None] * number, *block), at)

  def call(self, kernel, inputs, outputs, dtypes, scratch) -> list[jax.Array]:
    """Runs kernel(visit, inputs, outputs, scratch) at all points."""
    problem = self.problem
    sizes = [problem.leading[n] for n in self._own]
    shapes, specs = zip(*outputs)
    arrays, input_specs = zip(*inputs)
    count = len(sizes) + 1
    visits = self.visits.packed(bool(self.shared))

    def body(*refs):
      grid = [pl.program_id(n) for n in range(count)]
      order, *others = _split(refs, [len(visits), len(arrays), len(shapes)])
      kernel(self._place(grid, *order), *others)

    return pl.pallas_call(
      body,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(visits),
        grid=(*sizes, len(self.visits.rows)),
        in_specs=input_specs,
        out_specs=list(specs),
        scratch_shapes=[pltpu.VMEM(each, problem.dtype) for each in scratch],
      ),
      out_shape=[
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in zip(shapes, dtypes)
      ],
      compiler_params=pltpu.CompilerParams(
        dimension_semantics=(pltpu.PARALLEL,) * len(sizes) + (pltpu.ARBITRARY,),
        vmem_limit_bytes=_VMEM,
      ),
      interpret=problem.interpret,
    )(*visits, *arrays)


def _split(values: Sequence[Any], sizes: Sequence[int]) -> list[Sequence[Any]]:
  """The first of `sizes` values, the next, and the rest."""
  parts = []
  for size in sizes:
    parts.append(values[:size])
    values = values[size:]
  return [*parts, values]


def _inputs(problem, walk, operands, query, key, value):
  tokens = zip((query, key, value), (0, 1, 1))
  return [
    *((array, walk.tokens(array.shape, axis)[1]) for array, axis in tokens),
    *(
      walk.operand(*each)
      for each in zip(problem.functions.operands, operands, strict=True)
    ),
  ]


def _row_inputs(problem, walk, rows, cotangent):
  length = cotangent.shape[-2]
  return [
    *((each[..., None, :], walk.statistics(length)[1]) for each in rows),
    (cotangent, walk.tokens(cotangent.shape, 0)[1]),
  ]


def _of_sizes(indices, sizes):
  return tuple(0 if size == 1 else n for n, size in zip(indices, sizes))


def _sum_dtype(problem, tokens, leading=None):
  """The dtype of a gradient; that of sums if it is summed over leading axes."""
  leading = problem.leading if leading is None else tuple(leading)
  return tokens.dtype if tokens.shape[:-2] == leading else problem.dtype


def _core_2d(operand: Operand) -> tuple[int, ...]:
  """The shape of an operand of one head in VMEM, of rank 2 at least."""
  if not operand.core:
    return (1, _LANES)
  return (1,) * (2 - len(operand.core)) + operand.core


def _readable(array: jax.Array) -> jax.Array:
  """Booleans and numbers of 16 bits as numbers that scalar memory has."""
  if array.dtype == jnp.bool_:
    return array.astype(jnp.int32)
  return array


def _lengthened(array: jax.Array, axis: int, length: int) -> jax.Array:
  """Repeats the last entry of an axis up to `length`."""
  widths = [(0, 0)] * array.ndim
  widths[axis] = (0, length - array.shape[axis])
  return jnp.pad(array, widths, mode="edge") if widths[axis][1] else array


def _as_row(column: jax.Array) -> jax.Array:
  """[n, 1] to [1, n]."""
  return jnp.broadcast_to(column, (column.shape[0], _LANES)).T[:1, :]


def _as_column(row: jax.Array) -> jax.Array:
  """[1, n] to [n, 1]."""
  return jnp.broadcast_to(row, (8, row.shape[-1])).T[:, :1]
