"""Scores with products of tokens and vectors of distances, in Hopper kernels.

A term of such a score multiplies each query, or each key, with a table of
vectors. A pair takes the product with the vector of its distance. A block keeps
the products of its own tokens with all vectors in shared memory, and those of
other tokens for one visit. Where all pairs of a visited tile are farther apart
than the table reaches, only the products with the first and the last vector are
needed, which are arrays of numbers of the visited tokens.

The gradients of the products of own tokens are kept in the same way. At the end
they are multiplied by the table, and by the tokens.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.attempts import make_finite
from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.terms.by_distance import (
  Distances,
  Term,
)
from attention.implementations.pallas.hopper.tiles import matrices, parts
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_ROW,
  SIDE,
  Axes,
)
from attention.implementations.pallas.hopper.tiles.look_up import (
  Places,
  at_end,
  entries,
  put,
)


def prepare_own(block: Block) -> None:
  """Computes the products of own tokens."""
  for term in _terms(block, of_own=True):
    _write_products(block, term, of_own=True)
    for name, place in term.ends.items():
      if name in block.results:
        numbers = _line(block, block.of_term["products"][term.table], place)
        block.results[name][...] = numbers
    if term.table in block.of_term["gradients"]:
      set_to_zero(block, block.of_term["gradients"][term.table])
  if isinstance(block.problem.term, Distances):
    plgpu.commit_smem()


def set_to_zero(block: Block, tile: Any) -> None:
  """Sets the lines of a tile to zero."""
  zeros = block.problem.zeros()

  def clear(place, state):
    tile[place, pl.ds(0, SIDE)] = zeros
    return state

  jax.lax.fori_loop(0, tile.shape[0], clear, None)


def of_others(block: Block, starts: Any) -> list[jax.Array]:
  """The products of other tokens with vectors, of the pairs of a tile."""
  # Before the dot products, as all products at once need too many registers.
  found = []
  for term in _terms(block, of_own=False):
    _prepare_other(block, term, _start(block, term, starts))
    plgpu.commit_smem()
    found.append(_entries(block, term, starts))
  return found


def with_own(
  block: Block, products: Sequence[jax.Array], starts: Any
) -> jax.Array:
  """The sum of products of pairs, and of those of own tokens with vectors."""
  own = [_entries(block, each, starts) for each in _terms(block, of_own=True)]
  return functools.reduce(jnp.add, [*products, *own])


def _entries(block: Block, term: Term, starts: Any) -> jax.Array:
  tile = block.of_term["products"][term.table]
  return entries(block.problem, tile, _places(block, term, starts))


def _prepare_other(block: Block, term: Term, start: Any) -> None:
  """Computes the products of visited tokens that a tile needs."""
  tile = block.of_term["products"][term.table]
  is_near = _is_near(term.size, start)

  @pl.when(is_near)
  def _():
    _write_products(block, term, of_own=False)

  @pl.when(jnp.logical_not(is_near))
  def _():
    for name, place in term.ends.items():
      numbers = block.problem.cast(block.tiles[name][...], BY_ROW)
      tile[place, pl.ds(0, SIDE)] = _finite(numbers)


def _write_products(block: Block, term: Term, *, of_own: bool) -> None:
  """Writes the products of tokens with all vectors of a table."""
  for first in range(0, term.rows, SIDE):
    rows = min(SIDE, term.rows - first)
    numbers = matrices.product(
      block.problem,
      block.tokens(of_own),
      _vectors(block, term, first),
      *block.tables,
      is_transposed=True,
      columns=rows,
    )
    lines = block.of_term["products"][term.table].at[
      pl.ds(first, rows), pl.ds(0, SIDE)
    ]
    block.problem.write_transposed(lines, numbers)
  plgpu.commit_smem()


def add_gradients(block: Block, of_scores: jax.Array, starts: Any) -> None:
  """Adds to the gradients of the products of own tokens."""
  for term in _terms(block, of_own=True):
    tile = block.of_term["gradients"][term.table]
    add_to_lines(block, tile, of_scores, _places(block, term, starts))


def add_to_lines(
  block: Block, tile: Any, of_scores: jax.Array, places: Places
) -> None:
  """Adds to the gradients of values per relative distance, [n, 64]."""
  _add_ends(block, tile, of_scores, places)

  @pl.when(_is_near(places.size, places.start))
  def _():
    put(block.problem, tile, of_scores, places)


def _add_ends(
  block: Block, tile: Any, of_scores: jax.Array, places: Places
) -> None:
  """Adds the sums over pairs outside of the table."""
  last = places.size - 1

  def add_sum(place, is_there, is_last):
    @pl.when(is_there)
    def _():
      chosen = of_scores
      if last:
        chosen = at_end(block.problem, of_scores, places, is_last=is_last)
      total = _line(block, tile, place) + jnp.sum(chosen, axis=1)
      tile[place, pl.ds(0, SIDE)] = total

  add_sum(0, (places.start < SIDE) | (last == 0), False)
  if last:
    add_sum(last, places.start > last - SIDE, True)


def add_tokens(block: Block, sums: Any) -> None:
  """Adds to the gradients of own tokens, unscaled."""
  for term, first in _chunks(block):
    _write_factor(block, term, first, 1.0)
    matrices.add_product(
      block.problem,
      sums,
      block.factors[0],
      _vectors(block, term, first),
      *block.tables,
    )


def add_tables(block: Block) -> None:
  """Adds the gradients of tables to the block's parts."""
  tokens = block.tokens(True)
  if block.problem.is_masked and _terms(block, of_own=True):
    make_finite(block.problem, tokens, Axes.TOKENS)
  for term, first in _chunks(block):
    if term.table in block.direct:
      _write_factor(block, term, first, block.problem.factor)
      rows, factor = pl.ds(first, SIDE), block.factors[0]
      parts.add_outer_products(block, term.table, factor, tokens, rows)


def _chunks(block: Block) -> Iterator[tuple[Term, int]]:
  """The terms of own tokens, and the first row of each 64 of their tables."""
  for term in _terms(block, of_own=True):
    for first in range(0, term.padded, SIDE):
      yield term, first


def _write_factor(block: Block, term: Term, first: int, scale: float) -> None:
  """Writes gradients of products of own tokens as a factor [64, 64]."""
  lines = block.of_term["gradients"][term.table].at[
    pl.ds(first, SIDE), pl.ds(0, SIDE)
  ]
  numbers = block.problem.read_transposed(lines)
  numbers = numbers if scale == 1.0 else numbers * scale
  factor = block.factors[0]
  factor[...] = numbers.astype(factor.dtype)
  plgpu.commit_smem()


def _vectors(block: Block, term: Term, first: int) -> Any:
  """64 vectors of a table, at an address that is computed here."""
  return block.matrix(term.table, pl.ds(first + block.zero[0], SIDE))


def _terms(block: Block, *, of_own: bool) -> list[Term]:
  term, of_keys = block.problem.term, block.are_keys_own == of_own
  return term.own(of_keys) if isinstance(term, Distances) else []


def _places(block: Block, term: Term, starts: Any) -> Places:
  return Places(
    size=term.size,
    sign=-term.sign if block.are_keys_own else term.sign,
    of_rows=term.of_keys == block.are_keys_own,
    start=_start(block, term, starts),
  )


def _start(block: Block, term: Term, starts: Any) -> jax.Array:
  """The place of the first pair of a tile; those far outside are alike."""
  own, other = starts
  distance = own - other if block.are_keys_own else other - own
  shift = block.problem.term.shift
  if isinstance(shift, str):
    shift = block.number(shift, 0)
  start = term.sign * (distance + shift) + term.size // 2
  return jnp.clip(start, -SIDE, term.size + SIDE).astype(jnp.int32)


def _is_near(size: int, start: Any) -> jax.Array:
  """Whether a pair of a tile may have another place than an end."""
  return (start > -SIDE) & (start < size - 1 + SIDE)


def _line(block: Block, tile: Any, place: int) -> jax.Array:
  return block.problem.cast(tile[place, pl.ds(0, SIDE)], BY_ROW)


def _finite(numbers: jax.Array) -> jax.Array:
  # NaN and infinity of a token are in its other products, too.
  return jnp.where(jnp.abs(numbers) < jnp.inf, numbers, 0.0)
