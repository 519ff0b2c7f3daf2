"""Projections of tokens by additive scores, in the kernels for Hopper GPUs.

A kernel projects the queries and keys before those of attention. The kernels of
gradients transpose the projections of their own tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.functions import kernel_precision
from attention.implementations.pallas.hopper import matrices, parts
from attention.implementations.pallas.hopper.attempts import make_finite
from attention.implementations.pallas.hopper.block import Block, Place
from attention.implementations.pallas.hopper.pairs import base, wrappers
from attention.implementations.pallas.hopper.parts import Slice
from attention.implementations.pallas.hopper.tiles import (
  BY_COLUMN,
  SIDE,
  Axes,
  Input,
  down,
  read_transposed,
  swizzled,
  write_transposed,
)
from attention.implementations.pallas.hopper.token_maps import changes_tokens
from attention.implementations.pallas.operands import Operand, of_parameter
from attention.request import Request
from attention.scores.classical import Additive, Concat

# The channels of projections that kernels compute: the sums of more do not fit
# into a block's shared memory.
_CHANNELS = SIDE


@dataclasses.dataclass(frozen=True)
class Projection:
  """A product of tokens [..., T, D] with rows of a matrix, and a bias."""

  matrix: str  # the name of an input
  first_row: int
  features: int
  bias: str | None = None  # the name of an input

  def rows(self, place: Place, matrix: Any) -> Any:
    """The matrix [D, A] of an entry of the leading axes."""
    rows = pl.ds(self.first_row, self.features)
    return matrix.at[(*place.leading(matrix.shape[:-2]), rows)]


@dataclasses.dataclass(frozen=True)
class Projections:
  """Those of queries and keys, and their arrays by the names of inputs."""

  of_tokens: dict[str, Projection]
  operands: dict[str, Operand]

  def slices(self, own: str) -> dict[str, Slice]:
    """What the kernel of own tokens adds to gradients of arrays, by name."""
    projection = self.of_tokens[own]
    vector = Slice((_CHANNELS,), 0)
    core = projection.features, _CHANNELS
    found = {projection.matrix: Slice(core, projection.first_row * _CHANNELS)}
    if projection.bias is not None:
      found[projection.bias] = vector
    if own == "query":
      found["weight"] = vector  # the score's weight of each channel
    return found


def of_request(request: Request) -> Projections | None:
  """The projections of a score that kernels compute; None if XLA does."""
  score, rank = base(request.score), len(request.leading)
  if any(map(changes_tokens, wrappers(request.score))):
    return None
  features, key_features = request.query.shape[-1], request.key.shape[-1]
  if type(score) is Additive:
    operands = {
      "query weight": of_parameter(score.query_weight, 2, rank),
      "key weight": of_parameter(score.key_weight, 2, rank),
    }
    bias = None
    if score.bias is not None:
      bias = "bias"
      operands[bias] = of_parameter(score.bias, 1, rank)
    query = Projection("query weight", 0, features, bias)
    key = Projection("key weight", 0, key_features)
  elif type(score) is Concat:
    operands = {"both weights": of_parameter(score.weight, 2, rank)}
    query = Projection("both weights", 0, features)
    key = Projection("both weights", features, key_features)
  else:
    return None
  if not _has_kernels(request, [*operands.values()]):
    return None
  return Projections({"query": query, "key": key}, operands)


def _has_kernels(request: Request, operands: Sequence[Operand]) -> bool:
  """Whether kernels compute projections of these dtypes and sizes."""
  query, key, value = request.tokens
  dtypes = [query.dtype]
  if query.dtype == jnp.bfloat16:
    # A matrix of float32 is the sum of two of bfloat16, which has its range.
    dtypes.append(jnp.dtype(jnp.float32))
  return (
    query.dtype == key.dtype == value.dtype
    and query.dtype.itemsize == 2
    and all(each.array.dtype in dtypes for each in _matrices(operands))
    and {query.shape[-1], key.shape[-1]} <= {64, 128}
    and all(each.core[-1] == _CHANNELS for each in operands)
    # Gradients that are summed over leading axes are float32, and do not fit
    # into the tile of tokens that they replace.
    and query.shape[:-2] == key.shape[:-2] == request.leading
    and kernel_precision(request.precision) == jax.lax.Precision.DEFAULT
  )


def _matrices(operands: Sequence[Operand]) -> list[Operand]:
  return [each for each in operands if len(each.core) == 2]


def projected(
  problem: Any, inputs: Mapping[str, Input], tokens: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
  """The projected queries and keys, [A, ..., T], in one kernel."""
  projections = problem.projections.of_tokens
  rows = {name: each.shape[-2] // SIDE for name, each in tokens.items()}

  def run(*refs):
    names = *tokens, *inputs
    arrays, results = dict(zip(names, refs)), refs[len(names) :]
    row, entry = map(jax.lax.axis_index, ("row", "entry"))
    place = Place(problem=problem, row=row, entry=entry)
    for name, result in zip(tokens, results):
      write = functools.partial(
        _project, place, projections[name], arrays, arrays[name], result
      )
      pl.when(row < rows[name])(write)

  results = plgpu.kernel(
    run,
    out_type=tuple(
      jax.ShapeDtypeStruct(
        (_CHANNELS, *problem.leading, each.shape[-2]), jnp.float32
      )
      for each in tokens.values()
    ),
    grid=(max(rows.values()), math.prod(problem.leading)),
    grid_names=("row", "entry"),
    interpret=problem.interpret or None,
  )(*tokens.values(), *(each.array for each in inputs.values()))
  return dict(zip(tokens, results))


def _project(
  place: Place,
  projection: Projection,
  arrays: Mapping[str, Any],
  tokens: Any,
  result: Any,
) -> None:
  """Projects a tile of tokens."""
  problem, start = place.problem, place.row * SIDE

  def compute(tile, matrix_tile, result_tile, barrier):
    source = place.of_array(tokens, Axes.TOKENS, start)
    plgpu.copy_gmem_to_smem(source, tile, barrier)
    plgpu.barrier_wait(barrier)
    numbers = matrices.product(
      problem,
      tile,
      projection.rows(place, arrays[projection.matrix]),
      matrix_tile,
      is_transposed=False,
    )
    if projection.bias is not None:
      bias = arrays[projection.bias]
      bias = bias.at[place.leading(bias.shape[:-1])]
      bias = matrices.read(problem, bias, BY_COLUMN)
      numbers = numbers + down(bias, numbers.shape)
    write_transposed(problem, result_tile, numbers)
    plgpu.commit_smem()
    target = place.of_array(result, Axes.CHANNELS, start)
    plgpu.copy_smem_to_gmem(result_tile, target)
    plgpu.wait_smem_to_gmem(0)

  shape = projection.features, _CHANNELS
  pl.run_scoped(
    compute,
    swizzled((SIDE, projection.features), tokens.dtype),
    swizzled(shape, tokens.dtype),
    plgpu.SMEM((_CHANNELS, SIDE), jnp.float32),
    plgpu.Barrier(),
  )


def pull_back(block: Block, is_first: Any) -> None:
  """The gradients of own tokens, and of the arrays of their projection."""
  problem, projection = block.problem, block.projection
  tokens, of_projected = block.tiles["unmapped"], block.of_mapped
  numbers = read_transposed(problem, block.channel_sums["tokens"])
  of_projected[...] = numbers.astype(of_projected.dtype)
  if problem.is_masked:
    make_finite(problem, tokens, Axes.TOKENS)
  plgpu.commit_smem()
  if projection.matrix in block.direct:
    part = parts.own_part(block, projection.matrix)
    matrices.add_outer_products(problem, part, tokens, of_projected, is_first)
  if projection.bias in block.direct:
    _add_vector(block, projection.bias, numbers, is_first)
  if "weight" in block.direct:
    of_weight = read_transposed(problem, block.channel_sums["weight"])
    _add_vector(block, "weight", of_weight, is_first)
  matrix = projection.rows(block, block.inputs[projection.matrix].array)
  of_tokens = matrices.product(
    problem, of_projected, matrix, block.tiles["projection"], is_transposed=True
  )
  # The tile of tokens, which the outer products no longer read.
  block.results["tokens"][...] = of_tokens.astype(tokens.dtype)


def _add_vector(
  block: Block, name: str, numbers: jax.Array, is_first: Any
) -> None:
  """Adds the sum over tokens of numbers [64, A]."""
  part = parts.own_part(block, name)
  total = jnp.sum(numbers, axis=0)
  matrices.add(block.problem, part, total, is_first, BY_COLUMN)
