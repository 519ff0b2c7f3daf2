"""One visit of the gradient kernels for Hopper GPUs: a tile of other tokens."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.attempts import (
  make_finite,
  when,
)
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.block.gradient_rows import (
  clear_rows,
)
from attention.implementations.pallas.hopper.kernels import array_of_pairs
from attention.implementations.pallas.hopper.scores import (
  distances,
  normalization,
  rotations,
)
from attention.implementations.pallas.hopper.scores.tile import (
  TileScores,
  products_of_tokens,
  tile_scores,
  times_visited_scales,
)
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_ROW,
  WGMMA,
  Axes,
)


def visit_tile(
  block: Block, sums: Any, wanted, is_second: Any, starts: Sequence[Any]
) -> None:
  """Adds the gradients of a tile of other tokens."""

  @when(is_second)
  def _():
    clean(block, of_own=False)
    plgpu.commit_smem()

  tile = tile_scores(block, starts)
  of_scores = _gradients_of_scores(block, tile)
  _add_to_arrays(block, tile, of_scores, wanted)
  _add_to_tokens(block, tile, of_scores, sums)


def clean(block: Block, *, of_own: bool) -> None:
  """Replaces NaN and infinity, and cotangents of contexts that are NaN."""
  names = ["key", "value"] if of_own == block.are_keys_own else ["query"]
  for name in names:
    # A tile that is no input has mapped tokens.
    axes = block.inputs[name].axes if name in block.inputs else Axes.TOKENS
    flags = make_finite(block.problem, block.tiles[name], axes)
    if of_own and name != "value":
      block.flags[...] = flags
      if "remainder" in block.tiles:
        make_finite(block.problem, block.tiles["remainder"], axes)
  if "query" in names:
    clear_rows(block)


def _values(block: Block) -> tuple[Any, Any]:
  """The values of own and of visited tokens; of queries, the cotangents."""
  value, cotangent = (block.tiles[name] for name in ("value", "cotangent"))
  return (value, cotangent) if block.are_keys_own else (cotangent, value)


def _gradients_of_scores(block: Block, tile: TileScores) -> list[jax.Array]:
  """Those of the scores of a tile; keeps the weights as a factor of values."""
  weights = normalization.weights(block, tile.scores)
  if block.are_keys_own:
    of_scores_factor, weights_factor = block.factors
    dropped = tile.with_dropout(weights)
    weights_factor[...] = dropped.astype(of_scores_factor.dtype)
  of_weights = products_of_tokens(block.problem, [_values(block)])
  of_weights = tile.with_dropout(of_weights)
  return normalization.of_scores(block, weights, of_weights)


def _add_to_arrays(
  block: Block,
  tile: TileScores,
  of_scores: Sequence[jax.Array],
  wanted: Sequence[str],
) -> None:
  """Adds the gradients of a bias and of numbers."""
  problem, starts = block.problem, tile.starts
  if block.of_bias is not None:
    places = problem.of_bias.places(starts)
    of_sums = functools.reduce(jnp.add, of_scores)
    distances.add_to_lines(block, block.of_bias, of_sums, places)
  for name in array_of_pairs.of_block(block):
    numbers = problem.cast(tile.pull_back(of_scores, name), WGMMA)
    array_of_pairs.add_tile(block, name, numbers, starts[1])
  for name in wanted:
    sums_of_pairs = block.sums_of_pairs(name)
    before = problem.cast(sums_of_pairs[...], BY_ROW)
    # A derivative of zero is no array of registers.
    of_number = problem.cast(tile.pull_back(of_scores, name), WGMMA)
    of_number = jnp.sum(of_number, axis=1)
    sums_of_pairs[...] = before + of_number


def _add_to_tokens(
  block: Block, tile: TileScores, of_scores: Sequence[jax.Array], sums: Any
) -> None:
  """Adds the gradients of own tokens and of values."""
  problem, starts = block.problem, tile.starts
  of_scores_factor, *weights_factor = block.factors
  of_products = tile.pull_back(of_scores, None)
  if problem.channels is not None:
    problem.channels.add_gradients(block, of_products)
  else:
    distances.add_gradients(block, of_products, starts)
    of_products = times_visited_scales(block, of_products)
    of_scores_factor[...] = of_products.astype(of_scores_factor.dtype)
  plgpu.commit_smem()
  if problem.channels is None:
    plgpu.wgmma(sums["tokens"], of_scores_factor, block.tokens(False))
  if "sinusoids" in sums:
    factor = rotations.visited_factor(block)
    plgpu.wgmma(sums["sinusoids"], of_scores_factor, factor)
  if block.are_keys_own:
    _, cotangents = _values(block)
    plgpu.wgmma(sums["value"], weights_factor[0], cotangents)
  if sums:  # the next visit overwrites the factors
    plgpu.wgmma_wait(0)
