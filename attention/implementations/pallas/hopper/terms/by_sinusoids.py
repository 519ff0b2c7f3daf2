"""Transformer-XL's score in Hopper kernels: its arrays, and sinusoids.

The score of a query q and a key k is (q + u) . k + p . s, times a scale. s are
sinusoids of the key's position, and p is the product W (q + v), rotated by the
query's position (`TransformerXL.factors`). All tokens and heads read the same
sinusoids, which XLA computes and rounds to the tokens' dtype.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.arrays import axes
from attention.implementations.pallas.hopper.terms.score_term import ScoreTerm
from attention.implementations.pallas.hopper.tiles.layout import SIDE
from attention.implementations.pallas.operands import (
  Kind,
  Operand,
  Unsupported,
  of_parameter,
)
from attention.implementations.pallas.products import kernel_precision
from attention.implementations.pallas.wrapped import base, offset_of_keys
from attention.request import Request
from attention.scores.sinusoidal import TransformerXL

# The names of inputs: W, u, v, and the sinusoids of positions.
WEIGHT, CONTENT_BIAS, POSITION_BIAS = (
  "position weight",
  "content bias",
  "position bias",
)
OF_QUERIES, OF_KEYS = "query sinusoids", "key sinusoids"
# Sines of so many frequencies, then their cosines, and so on: a block rotates
# the features of these at once.
PIECE = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Sinusoids(ScoreTerm):
  """The arrays of a score."""

  features: int  # R, of sinusoids

  @property
  def terms(self) -> int:
    """The terms of W, which has the tokens' dtype or is the sum of two."""
    return 1 if self.differentiable[WEIGHT].array.dtype.itemsize == 2 else 2

  def memory(self, kernel):
    """The product W v, and the gradients of u and v."""
    vector = plgpu.SMEM(self.differentiable[CONTENT_BIAS].core, jnp.float32)
    return {
      "product": plgpu.SMEM((self.features,), jnp.float32),
      "of biases": [vector, vector],
    }

  def num_tables(self, kernel, *, is_scarce=False):
    """The terms of W."""
    return self.terms * self.features // SIDE

  def unused(self, tiles, results, own):
    # A block of queries maps tokens before it visits others, one of keys at
    # each visit.
    names = ("key", "value", OF_KEYS) if own == "query" else ()
    return [*results.values(), *(tiles[name] for name in names)]


def of_request(request: Request) -> Sinusoids | None:
  """The arrays of a score that is Transformer-XL's; None for others."""
  score, rank = base(request.score), len(request.leading)
  if type(score) is not TransformerXL:
    return None
  weight = of_parameter(score.weight, 2, rank)
  features = weight.core[0]
  _check(request, weight, features)
  arrays = {
    WEIGHT: weight,
    CONTENT_BIAS: of_parameter(score.content_bias, 1, rank),
    POSITION_BIAS: of_parameter(score.position_bias, 1, rank),
  }
  # The position of the first query relative to the first key.
  start = -offset_of_keys(request.score)
  lengths = [axes.round_up(n, SIDE) for n in request.scores_shape[-2:]]
  if isinstance(start, int) and start == 0:
    table = _table(score, 0, max(lengths), request.value.dtype)
    tables = {OF_QUERIES: table, OF_KEYS: table}
  else:
    tables = {
      OF_QUERIES: _table(score, start, lengths[0], request.value.dtype),
      OF_KEYS: _table(score, 0, lengths[1], request.value.dtype),
    }
  return Sinusoids(features, differentiable=arrays, constants=tables)


def _table(score: TransformerXL, start: Any, length: int, dtype: Any):
  """Sines and cosines [n, R] of the positions from `start` on."""
  places = start + jnp.arange(length)
  parts = [
    each.reshape(length, -1, 1, PIECE)
    for each in score.sinusoids(places, jnp.float32)
  ]
  numbers = jnp.concatenate(parts, axis=2).reshape(length, -1)
  return Operand(numbers.astype(dtype), Kind.WHOLE, ())


def _check(request: Request, weight: Operand, features: int) -> None:
  """Raises `Unsupported` unless the kernels compute such scores."""
  sizes = request.query.shape[-1], features
  if any(size not in (64, 128) for size in sizes):
    raise Unsupported(
      "has Transformer-XL's score for 64 or 128 features of tokens and of "
      f"sinusoids, got {sizes[0]} and {sizes[1]}"
    )
  dtypes = {each.dtype for each in request.tokens}
  dtype, of_weight = request.value.dtype, weight.array.dtype
  is_wide = (dtype, of_weight) == (jnp.bfloat16, jnp.float32)
  if len(dtypes) > 1 or not (of_weight == dtype or is_wide):
    raise Unsupported(
      "has Transformer-XL's score for tokens and a weight of one dtype, or for "
      f"a weight of float32 and tokens of bfloat16, got {of_weight} and "
      f"{', '.join(sorted(str(each) for each in dtypes))}"
    )
  if kernel_precision(request.precision) != jax.lax.Precision.DEFAULT:
    raise Unsupported("has Transformer-XL's score with the default precision")
