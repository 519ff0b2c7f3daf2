"""Projections of tokens by additive scores, in the kernels for Hopper GPUs.

Blocks project their own tokens once, and others at each visit. The kernels of
gradients transpose the projections of own tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.attempts import make_finite
from attention.implementations.pallas.hopper.block.block import (
  CHANNEL_SUMS,
  Block,
)
from attention.implementations.pallas.hopper.terms.score_term import ScoreTerm
from attention.implementations.pallas.hopper.terms.token_maps import (
  changes_tokens,
)
from attention.implementations.pallas.hopper.tiles import matrices, parts
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  SIDE,
  Axes,
  down,
  swizzled,
)
from attention.implementations.pallas.hopper.tiles.parts import Slice
from attention.implementations.pallas.operands import Operand, of_parameter
from attention.implementations.pallas.products import kernel_precision
from attention.implementations.pallas.wrapped import base, wrappers
from attention.request import Request
from attention.scores.classical import Additive, Concat

# The channels of projections that kernels compute: the sums of more do not fit
# into a block's shared memory.
_CHANNELS = SIDE


@dataclasses.dataclass(frozen=True)
class Projection:
  """A product of tokens [..., T, D] with rows of a matrix."""

  matrix: str  # the name of an input
  first_row: int
  features: int


@dataclasses.dataclass(frozen=True, eq=False)
class Projections(ScoreTerm):
  """Those of queries and keys, and their arrays by the names of inputs."""

  of_tokens: dict[str, Projection]
  bias: str | None  # the name of an input

  def slices(self, own):
    projection = self.of_tokens[own]
    vector = Slice((_CHANNELS,))
    core = projection.features, _CHANNELS
    found = {projection.matrix: Slice(core, projection.first_row * _CHANNELS)}
    if own == "query":
      found["weight"] = vector  # the score's weight of each channel
      if self.bias is not None:
        found[self.bias] = vector
    return found

  def tiles(self, kernel):
    arrays = [kernel.inputs[name].array for name in ("query", "key")]
    features = max(each.shape[-1] for each in arrays)
    return {"projection": swizzled((features, _CHANNELS), arrays[0].dtype)}

  def written_over(self, kernel):
    return dict.fromkeys(["context", "tokens"], kernel.own)

  def memory(self, kernel):
    """Gradients of channels."""
    if not kernel.of_gradients:
      return {}
    of_channels = plgpu.SMEM((_CHANNELS, SIDE), jnp.float32)
    mapped = swizzled((SIDE, _CHANNELS), kernel.inputs[kernel.own].array.dtype)
    sums = {
      name: of_channels for name in CHANNEL_SUMS if name in kernel.outputs
    }
    return {"mapped": mapped, **sums}


def of_request(request: Request) -> Projections | None:
  """The projections of a score that kernels compute; None if XLA does."""
  score, rank = base(request.score), len(request.leading)
  if any(map(changes_tokens, wrappers(request.score))):
    return None
  features, key_features = request.query.shape[-1], request.key.shape[-1]
  bias = None
  if type(score) is Additive:
    operands = {
      "query weight": of_parameter(score.query_weight, 2, rank),
      "key weight": of_parameter(score.key_weight, 2, rank),
    }
    if score.bias is not None:
      bias = "bias"
      operands[bias] = of_parameter(score.bias, 1, rank)
    query = Projection("query weight", 0, features)
    key = Projection("key weight", 0, key_features)
  elif type(score) is Concat:
    operands = {"both weights": of_parameter(score.weight, 2, rank)}
    query = Projection("both weights", 0, features)
    key = Projection("both weights", features, key_features)
  else:
    return None
  if not _has_kernels(request, [*operands.values()]):
    return None
  return Projections(
    {"query": query, "key": key},
    bias,
    differentiable=operands,
    is_projection=True,
    matrix_tile="projection",
  )


def _has_kernels(request: Request, operands: Sequence[Operand]) -> bool:
  """Whether kernels compute projections of these dtypes and sizes."""
  query, key, value = request.tokens
  return (
    query.dtype == key.dtype == value.dtype
    and query.dtype.itemsize == 2
    and all(
      matrices.has_terms(each.array, query) for each in _matrices(operands)
    )
    and {query.shape[-1], key.shape[-1]} <= {64, 128}
    and all(each.core[-1] == _CHANNELS for each in operands)
    # Gradients that are summed over leading axes are float32, and do not fit
    # into the tile of tokens that they replace.
    and query.shape[:-2] == key.shape[:-2] == request.leading
    and kernel_precision(request.precision) == jax.lax.Precision.DEFAULT
  )


def _matrices(operands: Sequence[Operand]) -> list[Operand]:
  return [each for each in operands if len(each.core) == 2]


def features(block: Block, *, of_own: bool) -> jax.Array:
  """The projections [64, A] of own tokens, or of those that a block visits."""
  problem = block.problem
  matrix = _matrix(block, of_own)
  numbers = matrices.product(
    problem,
    block.tokens(of_own),
    matrix,
    _matrix_tile(block, of_own),
    is_loaded=not of_own and matrices.is_one_term(matrix),
  )
  if not of_own or problem.term.bias is None:
    return numbers
  # That of queries, in the sums q_c + k_c of pairs.
  bias = block.tiles[problem.term.bias][...].astype(jnp.float32)
  return numbers + down(problem.cast(bias, BY_COLUMN), numbers.shape)


def load_for_visits(block: Block) -> None:
  """Keeps the matrix of the tokens that a block visits in shared memory."""
  # One of float32 has two terms, and is loaded again at each visit.
  matrix = _matrix(block, False)
  if matrices.is_one_term(matrix):
    matrices.load(block.problem, matrix, _matrix_tile(block, False))


def _matrix(block: Block, of_own: bool) -> Any:
  projection = block.projection(of_own)
  rows = pl.ds(projection.first_row, projection.features)
  return block.matrix(projection.matrix, rows)


def _matrix_tile(block: Block, of_own: bool) -> Any:
  rows = pl.ds(0, block.projection(of_own).features)
  return block.tiles["projection"].at[rows]


def pull_back(block: Block, others: jax.Array | None) -> None:
  """The gradients of own tokens, and of the arrays of their projection.

  Others are gradients of the same tokens, to which it adds.
  """
  problem, projection = block.problem, block.projection(True)
  tokens, of_projected = block.tokens(True), block.of_term["mapped"]
  numbers = problem.read_transposed(block.channel_sums["tokens"])
  of_projected[...] = numbers.astype(of_projected.dtype)
  if problem.is_masked:
    make_finite(problem, tokens, Axes.TOKENS)
  plgpu.commit_smem()
  parts.add_outer_products(block, projection.matrix, tokens, of_projected)
  if problem.term.bias in block.direct:
    _add_vector(block, problem.term.bias, numbers)
  if "weight" in block.direct:
    of_weight = problem.read_transposed(block.channel_sums["weight"])
    _add_vector(block, "weight", of_weight)
  of_tokens = matrices.product(
    problem,
    of_projected,
    _matrix(block, True),
    _matrix_tile(block, True),
    is_transposed=True,
  )
  of_tokens = of_tokens if others is None else of_tokens + others
  # The tile of tokens, which the outer products no longer read.
  block.results["tokens"][...] = of_tokens.astype(tokens.dtype)


def _add_vector(block: Block, name: str, numbers: jax.Array) -> None:
  """Adds the sum over tokens of numbers [64, A]."""
  part = parts.own_part(block, name)
  total = jnp.sum(numbers, axis=0)
  matrices.add(block.problem, part, total, block.is_first, BY_COLUMN)
