"""The predicted positions of local-p, in the kernels for Hopper GPUs.

A block predicts the shares p / S = sigmoid(v . tanh(W q)) of its own queries
before it visits keys. The kernel of the gradients of queries also writes them
for that of keys, and transposes the prediction at its end.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.attempts import make_finite
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.terms.prediction_arrays import (
  MATRIX,
  SHARES,
  VECTOR,
)
from attention.implementations.pallas.hopper.tiles import matrices, parts
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  BY_ROW,
  SIDE,
  TILE,
  WGMMA,
  Axes,
  across,
  down,
)
from attention.implementations.pallas.hopper.tiles.reciprocal import reciprocal


def predict_own(block: Block) -> None:
  """Computes the shares of own queries."""
  if SHARES not in block.own_numbers:
    return
  total = block.problem.zeros()
  for units in _all_units(block):
    total = total + jnp.sum(_hidden(block, units) * units.vector, axis=1)
  shares = 1.0 / (1.0 + jnp.exp(-total))
  if block.problem.is_masked:
    # Those of queries with NaN are not used, as all scores are NaN.
    shares = jnp.where(jnp.isnan(shares), 0.5, shares)
  block.own_numbers[SHARES][...] = shares
  if SHARES in block.results:
    block.results[SHARES][...] = shares
  plgpu.commit_smem()


def pull_back(block: Block) -> jax.Array | None:
  """The gradients of own queries by their predictions, [64, D].

  Adds to those of the arrays. None if nothing is predicted.
  """
  problem = block.problem
  if SHARES not in block.own_numbers:
    return None
  tokens, (factor, *_) = block.unmapped, block.factors
  if problem.is_masked:
    make_finite(problem, tokens, Axes.TOKENS)
    plgpu.commit_smem()
  shares = problem.cast(block.own_numbers[SHARES][...], BY_ROW)
  of_shares = problem.cast(block.of_shares[...], BY_ROW)
  of_total = across(of_shares * shares * (1.0 - shares), TILE)
  of_tokens = None
  for units in _all_units(block):
    hidden = _hidden(block, units)
    if VECTOR in block.direct:
      part = parts.own_part(block, VECTOR).at[units.places]
      numbers = jnp.sum(of_total * hidden, axis=0)
      matrices.add(problem, part, numbers, block.is_first, BY_COLUMN)
    of_product = of_total * units.vector * (1.0 - hidden * hidden)
    factor[...] = of_product.astype(factor.dtype)
    plgpu.commit_smem()
    columns = slice(None), units.places
    parts.add_outer_products(block, MATRIX, tokens, factor, columns)
    product = matrices.product(
      problem, factor, units.matrix, _tile(block), is_transposed=True
    )
    of_tokens = product if of_tokens is None else of_tokens + product
  return of_tokens


class _Units(NamedTuple):
  """Hidden units of the prediction, 64 at a time."""

  places: Any
  matrix: Any  # [D, 64], in the device's memory
  vector: jax.Array  # [64, 64], the same numbers in each row


def _all_units(block: Block) -> Iterator[_Units]:
  for first in range(0, block.inputs[MATRIX].array.shape[-1], SIDE):
    places = pl.ds(first, SIDE)
    vector = block.problem.cast(block.tiles[VECTOR][places], BY_COLUMN)
    matrix = block.matrix(MATRIX, slice(None), places)
    yield _Units(places, matrix, down(vector, TILE))


def _hidden(block: Block, units: _Units) -> jax.Array:
  """tanh(W q) of own queries, [64, 64]."""
  product = matrices.product(
    block.problem, block.unmapped, units.matrix, _tile(block)
  )
  # The fast tanh of GPUs has too few digits for the positions of a long source.
  exponential = jnp.exp(2.0 * product)
  fraction = reciprocal(block.problem, exponential + 1.0)
  return block.problem.cast(1.0 - 2.0 * fraction, WGMMA)


def _tile(block: Block) -> Any:
  """A tile [D, 64] for a part of the matrix."""
  rows = pl.ds(0, block.inputs[MATRIX].array.shape[-2])
  return block.tiles[block.problem.term.matrix_tile].at[rows, pl.ds(0, SIDE)]
