"""Numbers of rows in the gradient kernels for Hopper GPUs.

The kernel of queries makes them from the results of the forward kernel and
their cotangents, and writes them for the kernel of keys.
"""

import jax
import jax.numpy as jnp

from attention.implementations.pallas.gradient_rows import gradient_rows
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  BY_ROW,
  TILE,
  WGMMA,
  across,
  down,
  pieces,
)

# See `GradientRows`. With a mask the mean is NaN if the context is NaN, so that
# the first attempt has a result that is not finite; the second uses the finite
# one.
ROWS = ("maximum", "inverse", "mean")
MASKED_ROWS = (*ROWS, "finite mean")


def write_gradient_rows(block: Block) -> None:
  """Computes the numbers of own queries."""
  problem, tiles, results = block.problem, block.tiles, block.results

  def read(name):
    layout = BY_ROW if tiles[name].ndim == 1 else WGMMA
    return problem.cast(tiles[name][...].astype(jnp.float32), layout)

  names = "maximum", "total", "context", "cotangent"
  of_total = read("of_total") if "of_total" in tiles else None
  rows = gradient_rows(
    *map(read, names), of_total=of_total, is_masked=problem.is_masked
  )
  results["maximum"][...] = rows.maximum
  results["inverse"][...] = rows.inverse
  mean = rows.mean
  if rows.has_nan is not None:
    results["finite mean"][...] = mean
    mean = jnp.where(rows.has_nan > 0.0, jnp.nan, mean)
  results["mean"][...] = mean


def row_numbers(block: Block, name: str) -> jax.Array:
  """Numbers of rows, spread over a tile."""
  if block.are_keys_own:
    return down(block.problem.cast(block.tiles[name][...], BY_COLUMN), TILE)
  return across(block.problem.cast(block.results[name][...], BY_ROW), TILE)


def means(block: Block) -> jax.Array:
  """The means, spread over a tile; in a second attempt the finite ones."""
  is_finite = block.problem.is_masked and not block.are_keys_own
  return row_numbers(block, "finite mean" if is_finite else "mean")


def clear_rows(block: Block) -> None:
  """Sets the cotangents of contexts that are NaN to zero."""
  cast = block.problem.cast
  refs = block.tiles if block.are_keys_own else block.results
  mean, finite_mean = (
    cast(refs[name][...], BY_ROW) for name in ("mean", "finite mean")
  )
  # If the cotangent is NaN, mean and finite_mean are both NaN.
  of_row = jnp.where(jnp.isnan(mean), 1.0, 0.0)
  is_flagged = jnp.where(jnp.isnan(finite_mean), 0.0, of_row) > 0.0
  tile = block.tiles["cotangent"]
  for place in pieces(tile.shape[-1]):
    part = tile.at[:, place]
    numbers = cast(part[...].astype(jnp.float32), WGMMA)
    numbers = jnp.where(across(is_flagged, numbers.shape), 0.0, numbers)
    part[...] = numbers.astype(tile.dtype)
  if block.are_keys_own:
    refs["mean"][...] = finite_mean
