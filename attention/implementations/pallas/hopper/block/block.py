"""Blocks of the kernels for Hopper GPUs: what they hold, load and visit.

A block has 64 *own* tokens, the rows of its tiles, and visits the *other*
tokens 64 at a time. Own tokens are queries, or keys in the kernel of their
gradients.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.memory import Memory
from attention.implementations.pallas.hopper.terms.prediction_arrays import (
  SHARES,
)
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  BY_ROW,
  SIDE,
  TILE,
  WGMMA,
  Axes,
  Input,
  across,
  down,
  parts_of_copy,
)
from attention.implementations.pallas.hopper.traced.bias_by_distance import (
  Numbers,
)
from attention.implementations.pallas.hopper.traced.pairs import number_dtype

# The results that are sums over channels, or made of them.
CHANNEL_SUMS = "tokens", "weight"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block(Memory):
  """A block of the grid, with the tiles that it holds in shared memory."""

  memory: Memory  # the same, where tiles of tensor cores are [1, n, m]
  problem: Any
  row: jax.Array  # of tiles
  entry: jax.Array  # of the leading axes
  own: str
  bounds: Any  # for each row of tiles, its first visit and their end
  inputs: Mapping[str, Input]  # with references to the device's memory
  direct: Mapping[str, Any]  # references to results without a tile of their own
  num_blocks: int  # of an entry of the leading axes
  part: jax.Array  # of the entries that share an array, see `BatchSplit`
  is_first_entry: Any  # of those that the block computes
  is_first: Any  # of the rows that the block computes

  @property
  def are_keys_own(self) -> bool:
    """Whether own tokens are keys."""
    return self.own == "key"

  def of_array(self, ref: Any, axes: Axes, start: Any) -> Any:
    """The tokens from `start` on, of this entry of the leading axes."""
    if axes is Axes.WHOLE:
      return ref.at[self.leading(ref.shape[:-1])]
    tokens, sizes = pl.ds(start, SIDE), ref.shape
    if axes is Axes.PAIRS:
      places = [pl.ds(self.row * SIDE, SIDE), tokens]
      places = places[::-1] if self.are_keys_own else places
      return ref.at[(*self.leading(sizes[:-2]), *places)]
    if axes is Axes.CHANNELS:
      return ref.at[(slice(None), *self.leading(sizes[1:-1]), tokens)]
    core = [tokens if each else slice(None) for each in axes.value[:2]]
    return ref.at[(*self.leading(sizes[: -len(core)]), *core)]

  def leading(self, sizes: Sequence[int]) -> tuple[Any, ...]:
    """The indices along the leading axes; 0 where an array has size 1."""
    entry, indices = self.entry, []
    for size, own in zip(reversed(self.problem.leading), reversed(sizes)):
      index = jax.lax.rem(entry, jnp.int32(size))
      entry = jax.lax.div(entry, jnp.int32(size))
      indices.append(0 if own == 1 else index)
    return tuple(reversed(indices))

  def matrix(self, name: str, rows: Any, columns: Any = slice(None)) -> Any:
    """A part of this entry's matrix [D, A], in the device's memory."""
    ref = self.inputs[name].array
    return ref.at[(*self.leading(ref.shape[:-2]), rows, columns)]

  def with_new_addresses(self) -> "Block":
    """The same block, whose tiles have addresses that are computed here.

    The compiler would compute the addresses of all products before a loop, and
    keep them in registers, which are scarce.
    """
    memory = self.memory.at(self.zero[0])
    return dataclasses.replace(self, **vars(memory))

  def load(self, of_own: bool, start: Any) -> None:
    """Copies tiles of own or other tokens to shared memory, and waits."""
    staged = None
    for name, (ref, axes, of_keys) in self.inputs.items():
      is_own = of_keys is None or of_keys == self.are_keys_own
      if axes.is_tile and is_own == of_own:
        source, target = self.of_array(ref, axes, start), self.tiles[name]
        if axes is Axes.STAGED:  # queries or keys: one array of a load
          staged, target = target, self.staging
        for part in parts_of_copy(ref, axes):
          whole, tile = source, target
          if part is not None:
            whole, tile = source.at[part], target.at[part]
          plgpu.copy_gmem_to_smem(whole, tile, self.barriers[of_own])
    plgpu.barrier_wait(self.barriers[of_own])
    if staged is not None:
      self._transpose(staged)

  @property
  def own_and_other(self) -> tuple[Any, Any]:
    """The tiles of own tokens and of those that are visited."""
    return self.tokens(True), self.tokens(False)

  def tokens(self, of_own: bool) -> Any:
    """The tile of own tokens, or of those that are visited."""
    return self.tiles[self._name(of_own)]

  @property
  def unmapped(self) -> Any:
    """The tile of own tokens before a map of the kernel."""
    return self.tiles.get("unmapped", self.tokens(True))

  @property
  def own_map(self) -> Any:
    """The map of own tokens that the kernel computes, or None."""
    return self.problem.term.maps.get(self._name(True))

  @property
  def of_tokens(self) -> Any:
    """The gradients of own tokens as they are multiplied."""
    is_mapped = self.own_map is not None
    return self.of_term["mapped"] if is_mapped else self.results["tokens"]

  def _name(self, of_own: bool) -> str:
    return "key" if of_own == self.are_keys_own else "query"

  def sums_of_pairs(self, name: str) -> Any:
    """The gradients of numbers of own tokens, which are sums over pairs."""
    return self.of_shares if name == SHARES else self.results[name]

  def projection(self, of_own: bool) -> Any:
    """The projection of own tokens, or of those that are visited."""
    return self.problem.term.of_tokens[self._name(of_own)]

  @property
  def channel_sums(self) -> dict[str, Any]:
    """The gradients of channels, [A, 64], of which gradients are made."""
    sums = self.of_term or self.results
    return {name: sums[name] for name in CHANNEL_SUMS if name in sums}

  def _transpose(self, tile: Any) -> None:
    """Writes the staged tokens as [D, 64]."""
    tokens = self.staging[...].astype(jnp.float32)
    tokens = self.problem.cast(tokens, WGMMA)
    if self.problem.is_masked and "context" in self.results:
      # A function of the user may make a number of a feature that is NaN.
      is_bad = jnp.where(jnp.abs(tokens) < np.inf, 0.0, 1.0)
      is_bad = across(jnp.max(is_bad, axis=1) > 0.0, tokens.shape)
      tokens = jnp.where(is_bad, jnp.nan, tokens)
    self.problem.write_transposed(tile, tokens)

  def staged(self, result: Any) -> Any:
    """A result [D, 64] as tokens [64, D] in shared memory."""
    tokens = self.problem.read_transposed(result)
    self.staging[...] = tokens.astype(self.staging.dtype)
    return self.staging

  def visits(self, body: Callable, state: Any) -> Any:
    """The state after body(block, starts, state) of all visible tiles."""

    def visit(column, state):
      block = self.with_new_addresses()
      block.load(False, column * SIDE)
      return body(block, (self.row * SIDE, column * SIDE), state)

    first, end = (self.bounds[2 * self.row + n] for n in range(2))
    return jax.lax.fori_loop(first, end, visit, state)

  def number(self, name: str, place: Any) -> jax.Array:
    """A number of this entry of the leading axes."""
    ref = self.inputs[name].array
    return ref[(*self.leading(ref.shape[:-1]), place)]

  def numbers(self, name: str) -> Any:
    """The numbers of pairs, or of rows, columns or a tile, spread over it."""
    if name in self.own_numbers:
      own = self.problem.cast(self.own_numbers[name][...], BY_ROW)
      return across(own, TILE)
    ref, axes, of_keys = self.inputs[name]
    if axes is Axes.NUMBERS:
      return self.number(name, 0)
    if axes is Axes.WHOLE:
      return Numbers(self.problem.interpret, self.tiles[name])
    if axes is Axes.PAIRS:
      read = self.problem.read
      if self.are_keys_own:
        read = self.problem.read_transposed
      return read(self.tiles[name], dtype=number_dtype(ref))
    tile = self.tiles[name][...]
    if of_keys == self.are_keys_own:
      return across(self.problem.cast(tile, BY_ROW), TILE)
    return down(self.problem.cast(tile, BY_COLUMN), TILE)
