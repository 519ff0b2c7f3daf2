"""Numbers of rows in the gradient kernels for Hopper GPUs.

The kernel of queries makes them from the results of the forward kernel and
their cotangents, and writes them for the kernel of keys.
"""

import jax
import jax.numpy as jnp

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

# Weights are exp(score - maximum) * inverse. The mean is that of the cotangents
# of a row's weights. With a mask it is NaN if the context is NaN, so that the
# first attempt has a result that is not finite; the second uses the finite one.
ROWS = ("maximum", "inverse", "mean")
MASKED_ROWS = (*ROWS, "finite mean")


def write_rows(block: Block) -> jax.Array:
  """Computes the numbers of own queries; their means."""
  problem, tiles, results = block.problem, block.tiles, block.results

  def read(name):
    layout = BY_ROW if tiles[name].ndim == 1 else WGMMA
    return problem.cast(tiles[name][...].astype(jnp.float32), layout)

  total = read("total")
  # A row without keys has the factor 0. With a mask a row of NaN has it too, as
  # it then has no derivatives.
  has_weights = total > 0.0 if problem.is_masked else total != 0.0
  inverse = 1.0 / jnp.where(has_weights, total, 1.0)
  results["inverse"][...] = jnp.where(has_weights, inverse, 0.0)
  results["maximum"][...] = jnp.where(has_weights, read("maximum"), 0.0)
  context = read("context")
  products = context * read("cotangent")
  is_nan = jnp.isnan(context)
  if problem.is_masked:
    products = jnp.where(is_nan, 0.0, products)
  mean = jnp.sum(products, axis=1)
  if "of_total" in tiles:
    of_total = read("of_total") * total
    if problem.is_masked:
      of_total = jnp.where(jnp.isnan(total), 0.0, of_total)
    mean = mean - of_total
  if problem.is_masked:
    results["finite mean"][...] = mean
    is_flagged = jnp.max(jnp.where(is_nan, 1.0, 0.0), axis=1) > 0.0
    mean = jnp.where(is_flagged, jnp.nan, mean)
  results["mean"][...] = mean
  return mean


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
  mean, finite = (
    cast(refs[name][...], BY_ROW) for name in ("mean", "finite mean")
  )
  # Both are NaN if a cotangent is.
  of_row = jnp.where(jnp.isnan(mean), 1.0, 0.0)
  is_flagged = jnp.where(jnp.isnan(finite), 0.0, of_row) > 0.0
  tile = block.tiles["cotangent"]
  for place in pieces(tile.shape[-1]):
    part = tile.at[:, place]
    numbers = cast(part[...].astype(jnp.float32), WGMMA)
    numbers = jnp.where(across(is_flagged, numbers.shape), 0.0, numbers)
    part[...] = numbers.astype(tile.dtype)
  if block.are_keys_own:
    refs["mean"][...] = finite
