"""Transformer-XL's score in Hopper kernels, see `by_sinusoids`.

A block maps queries in shared memory: a query q becomes q + u, and the
sinusoids of its position become its product p, both rounded to the tokens'
dtype. A block of queries maps its own, a block of keys those that it visits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.attempts import make_finite
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.terms.by_sinusoids import (
  CONTENT_BIAS,
  OF_KEYS,
  OF_QUERIES,
  PIECE,
  POSITION_BIAS,
  WEIGHT,
  Sinusoids,
)
from attention.implementations.pallas.hopper.tiles import matrices, parts
from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  BY_ROW,
  SIDE,
  WGMMA,
  Axes,
  down,
)


def prepare(block: Block) -> None:
  """Loads W, and maps own queries."""
  if not _has_sinusoids(block):
    return
  _write_product_of_bias(block)
  for chunk in _chunks(block):
    matrices.load(block.problem, _rows(block, chunk), *_tables(block, chunk))
  if has_own_map(block):
    _map_queries(block)


def prepare_visited(block: Block) -> None:
  """Maps visited queries."""
  if _has_sinusoids(block) and block.are_keys_own:
    _map_queries(block)


def factors(block: Block) -> list[tuple[Any, Any]]:
  """The tiles of own and other tokens whose products are added to scores."""
  return [] if not _has_sinusoids(block) else [_own_and_other(block)]


def visited_factor(block: Block) -> Any:
  """The sinusoids of visited keys, by which gradients are multiplied."""
  return _own_and_other(block)[1]


def _own_and_other(block: Block) -> tuple[Any, Any]:
  tiles = block.tiles[OF_QUERIES], block.tiles[OF_KEYS]
  return tiles[::-1] if block.are_keys_own else tiles


def add_tokens(block: Block, sums: Any) -> None:
  """Adds the gradients of products p to those of own queries, unscaled.

  The tiles of own queries and sinusoids then have queries as they are, and the
  gradients of W (q + v).
  """
  if not has_own_map(block):
    return
  load_unmapped(block)
  of_content, of_biases = block.of_term["of biases"]
  _write_column_sums(of_content, sums["tokens"][...])
  tile = block.tiles[OF_QUERIES]
  table = block.problem.cast(tile[...].astype(jnp.float32), WGMMA)
  numbers = _rotated_back(block.problem, sums["sinusoids"][...], table)
  tile[...] = numbers.astype(tile.dtype)
  plgpu.commit_smem()
  for chunk in _chunks(block):
    matrices.add_product(
      block.problem,
      sums["tokens"],
      tile.at[:, pl.ds(chunk * SIDE, SIDE)],
      _rows(block, chunk),
      *_tables(block, 0),
    )
  _write_column_sums(of_biases, sums["tokens"][...])


def load_unmapped(block: Block) -> None:
  """Loads own queries and sinusoids again, over what a block has written."""
  if has_own_map(block):
    plgpu.commit_smem()
    block.load(True, block.row * SIDE)


def _has_sinusoids(block: Block) -> bool:
  return isinstance(block.problem.term, Sinusoids)


def has_own_map(block: Block) -> bool:
  """Whether a block maps its own tokens."""
  return _has_sinusoids(block) and not block.are_keys_own


def add_arrays(block: Block) -> None:
  """Adds the gradients of W, u and v to the block's parts."""
  if not has_own_map(block):
    return
  problem, query = block.problem, block.tiles["query"]
  of_content, of_biases = (
    problem.cast(each[...], BY_COLUMN) for each in block.of_term["of biases"]
  )
  of_vectors = {
    CONTENT_BIAS: of_content,
    POSITION_BIAS: of_biases - of_content,
  }
  for name, numbers in of_vectors.items():
    if name in block.direct:
      part = parts.own_part(block, name)
      numbers = numbers * problem.factor
      matrices.add(problem, part, numbers, block.is_first, BY_COLUMN)
  if WEIGHT not in block.direct:
    return
  if problem.is_masked:
    make_finite(problem, query, Axes.TOKENS)
  _add_bias(block, POSITION_BIAS, problem.factor)
  parts.add_outer_products(block, WEIGHT, block.tiles[OF_QUERIES], query)


def _map_queries(block: Block) -> None:
  """Writes q + u and p over the tiles of queries and of their sinusoids."""
  problem, tile = block.problem, block.tiles[OF_QUERIES]
  half = problem.term.features // 2
  for chunk in _chunks(block):
    # Few features at once, as registers are scarce.
    first, second = (
      _product(block, start + chunk * PIECE) for start in (0, half)
    )
    part = tile.at[:, pl.ds(chunk * SIDE, SIDE)]
    table = problem.cast(part[...].astype(jnp.float32), WGMMA)
    part[...] = _rotated(problem, first, second, table).astype(tile.dtype)
  plgpu.commit_smem()  # all warps have read the queries
  _add_bias(block, CONTENT_BIAS, 1.0)


def _product(block: Block, row: int) -> jax.Array:
  """A piece of W (q + v), of the rows of W from this one on."""
  chunk, first = divmod(row, SIDE)
  product = matrices.product(
    block.problem,
    block.tiles["query"],
    _rows(block, chunk),
    *(each.at[pl.ds(first, PIECE)] for each in _tables(block, chunk)),
    is_transposed=True,
    is_loaded=True,
  )
  of_bias = block.of_term["product"][pl.ds(row, PIECE)]
  return product + down(block.problem.cast(of_bias, BY_COLUMN), product.shape)


def _write_product_of_bias(block: Block) -> None:
  """Writes W v."""
  problem, bias = block.problem, block.tiles[POSITION_BIAS]
  for chunk in _chunks(block):
    rows, total = _rows(block, chunk), None
    for first in range(0, rows.shape[-1], SIDE):
      columns = pl.ds(first, SIDE)
      numbers = problem.read(rows.at[:, columns])
      factor = down(problem.cast(bias[columns], BY_COLUMN), numbers.shape)
      part = jnp.sum(numbers * factor, axis=1)
      total = part if total is None else total + part
    places = pl.ds(chunk * SIDE, SIDE)
    block.of_term["product"][places] = problem.cast(total, BY_ROW)
  plgpu.commit_smem()


def _add_bias(block: Block, name: str, factor: float) -> None:
  """Adds a vector to the tile of queries, and multiplies it by a number."""
  problem, tile = block.problem, block.tiles["query"]
  for first in range(0, tile.shape[-1], SIDE):
    columns = pl.ds(first, SIDE)
    bias = problem.cast(block.tiles[name][columns], BY_COLUMN)
    part = tile.at[:, columns]
    numbers = problem.cast(part[...].astype(jnp.float32), WGMMA)
    numbers = numbers + down(bias, numbers.shape)
    numbers = numbers if factor == 1.0 else numbers * factor
    part[...] = numbers.astype(tile.dtype)
  plgpu.commit_smem()


def _write_column_sums(result: Any, numbers: jax.Array) -> None:
  """Writes the sum over tokens, of few features at once to save registers."""
  for first in range(0, numbers.shape[1], PIECE):
    part = jax.lax.slice(numbers, (0, first), (SIDE, first + PIECE))
    result[pl.ds(first, PIECE)] = jnp.sum(part, axis=0)


def _chunks(block: Block) -> Iterator[int]:
  """The numbers of 64 rows of W."""
  return iter(range(block.problem.term.features // SIDE))


def _rows(block: Block, chunk: int) -> Any:
  """64 rows of W in the device's memory."""
  return block.matrix(WEIGHT, pl.ds(chunk * SIDE + block.zero[0], SIDE))


def _tables(block: Block, chunk: int) -> Sequence[Any]:
  """The tiles of the terms of 64 rows of W."""
  terms = block.problem.term.terms
  return block.tables[chunk * terms : (chunk + 1) * terms]


def _rotated(
  device: Device, first: jax.Array, second: jax.Array, table: jax.Array
) -> jax.Array:
  """[p_2 s - p_1 c, p_1 s + p_2 c] of a piece of p, and of sinusoids [s, c]."""

  def pieces(first, second, table):
    halves = _reflected(first, second, table[:, :PIECE], table[:, PIECE:])
    return dict(zip((0, PIECE), halves))

  return _of_pieces(device, pieces, first, second, table)


def _rotated_back(
  device: Device, numbers: jax.Array, table: jax.Array
) -> jax.Array:
  """The gradients of p, in the order of W, from those of rotated pieces."""

  def pieces(numbers, table):
    found, half = {}, table.shape[1] // 2
    for start in range(0, half, PIECE):
      lower = slice(2 * start, 2 * start + PIECE)
      upper = slice(2 * start + PIECE, 2 * start + 2 * PIECE)
      parts = (
        each[:, own] for each in (numbers, table) for own in (lower, upper)
      )
      # This is its own transpose.
      found[start], found[half + start] = _reflected(*parts)
    return found

  return _of_pieces(device, pieces, numbers, table)


def _of_pieces(
  device: Device, pieces: Callable, *arrays: jax.Array
) -> jax.Array:
  """pieces(*arrays), by first columns, as one array like the last one."""
  if device.interpret:
    found = pieces(*arrays)
    return jnp.concatenate([found[each] for each in sorted(found)], axis=1)
  shape = arrays[-1].shape

  # JAX has no concatenation in kernels for GPUs.
  @plgpu.inline_mgpu(
    arg_types=(WGMMA,) * len(arrays),
    return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=WGMMA),
  )
  def concatenate(context, *arrays):
    del context
    result = arrays[-1].copy()
    for start, piece in pieces(*arrays).items():
      result[:, start : start + PIECE] = piece
    return result

  return concatenate(*arrays)


def _reflected(first: Any, second: Any, sines: Any, cosines: Any):
  return second * sines - first * cosines, first * sines + second * cosines
