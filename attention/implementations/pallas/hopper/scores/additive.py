"""Additive scores in the kernels for Hopper GPUs: sums of v_c tanh(q_c + k_c).

With x = 1 + exp(2 q_c) exp(2 k_c), tanh(q_c + k_c) is 1 - 2 / x. A kernel
computes exponentials once for each token of a tile, and one reciprocal for the
x of two channels: 1 / x = y / (x y) and 1 / y = x / (x y). A GPU computes
reciprocals and hyperbolic tangents at the same rate, an eighth of that of
products, so this takes half of the time of a tangent for each channel. It is
also more precise: a GPU's fast tangent has 11 bits.

Products of four exponentials must not overflow. A tile with larger features is
computed with tangents.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.scores import projections
from attention.implementations.pallas.hopper.scores.channels import (
  ChannelSum,
  add_to_sum,
  for_each_channel,
  vectors,
)
from attention.implementations.pallas.hopper.tiles.layout import (
  SIDE,
  TILE,
  across,
  down,
)
from attention.implementations.pallas.hopper.tiles.reciprocal import reciprocal

# Features up to which the exponentials of a tile are computed: (1 + exp(4 m))^2
# is a float32.
_LARGEST = 10.75
# A block has no memory for the exponentials of more channels.
_MOST_CHANNELS = 64


@dataclasses.dataclass(frozen=True)
class AdditiveSum(ChannelSum):
  """The sum over channels of v_c tanh(q_c + k_c), with a tangent for each."""

  channels: int

  def sums(self, block: Block) -> jax.Array:
    def add(channel, sums):
      tangents = jnp.tanh(self.sums_of_pairs(block, channel))
      return sums + tangents * block.tiles["weight"][channel]

    return for_each_channel(
      block, self.channels, add, block.problem.zeros(TILE)
    )

  def add_gradients(self, block: Block, of_sums: jax.Array) -> None:
    weight = block.tiles["weight"]

    def add(channel, state):
      tangents = jnp.tanh(self.sums_of_pairs(block, channel))
      of_own = jnp.sum((1.0 - tangents * tangents) * of_sums, axis=1)
      add_to_sum(block, "tokens", channel, of_own * weight[channel])
      if "weight" in block.channel_sums:
        of_weight = jnp.sum(of_sums * tangents, axis=1)
        add_to_sum(block, "weight", channel, of_weight)
      return state

    for_each_channel(block, self.channels, add, None)


class SharedReciprocals(AdditiveSum):
  """The same sum, with one reciprocal for two channels."""

  def scratch(self) -> Any:
    tile = plgpu.SMEM((self.channels, SIDE), jnp.float32)
    return [tile, tile, plgpu.SMEM((2,), jnp.float32)]

  def prepare(self, block: Block, *, of_own: bool) -> None:
    """Writes exponentials, or features if the tile has a large one."""
    problem, tile = block.problem, block.scratch[of_own]
    is_projected = problem.term.is_projection
    if is_projected:
      numbers = projections.features(block, of_own=of_own)
    else:
      numbers = block.tokens(of_own)[...]
    sizes = jnp.abs(numbers)
    if problem.is_masked:
      # Pairs of such tokens are hidden, or NaN in any case.
      sizes = jnp.where(sizes < jnp.inf, sizes, 0.0)
    largest = jnp.max(jnp.max(sizes, axis=1) if is_projected else sizes)
    block.scratch[2][int(of_own)] = largest
    numbers = jnp.where(_is_large(largest), numbers, _exponential(numbers))
    if is_projected:
      problem.write_transposed(tile, numbers)
    else:
      tile[...] = numbers
    plgpu.commit_smem()
    if is_projected and of_own:
      projections.load_for_visits(block)

  def sums_of_pairs(self, block: Block, channel: Any) -> jax.Array:
    other, own, largest = block.scratch
    own, other = vectors(block, own, other, channel)
    own, other = (
      jnp.where(_is_large(largest[number]), each, _feature(each))
      for number, each in ((1, own), (0, other))
    )
    return across(own, TILE) + down(other, TILE)

  def sums(self, block: Block) -> jax.Array:
    with_tangents = super().sums
    return jax.lax.cond(
      _has_large(block),
      lambda: with_tangents(block),
      lambda: self._sums_of_reciprocals(block),
    )

  def _sums_of_reciprocals(self, block: Block) -> jax.Array:
    weight = block.tiles["weight"]

    def add(pair, state):
      sums, total = state
      first, second = (weight[2 * pair + n] for n in range(2))
      x, y, reciprocal = _shared_reciprocal(block, pair)
      sums = sums + (first * y + second * x) * reciprocal
      return sums, total + (first + second)

    state, pairs = (
      (block.problem.zeros(TILE), jnp.float32(0.0)),
      self.channels // 2,
    )
    sums, total = for_each_channel(block, pairs, add, state, most=2)
    return total - 2.0 * sums

  def add_gradients(self, block: Block, of_sums: jax.Array) -> None:
    with_tangents, is_large = super().add_gradients, _has_large(block)

    @pl.when(is_large)
    def _():
      with_tangents(block, of_sums)

    @pl.when(jnp.logical_not(is_large))
    def _():
      self._add_with_reciprocals(block, of_sums)

  def _add_with_reciprocals(self, block: Block, of_sums: jax.Array) -> None:
    weight = block.tiles["weight"]
    has_weight = "weight" in block.channel_sums
    total = jnp.sum(of_sums, axis=1) if has_weight else jnp.float32(0.0)

    def add(pair, state):
      x, y, reciprocal = _shared_reciprocal(block, pair)
      for number, part in enumerate((y, x)):
        channel, share = 2 * pair + number, part * reciprocal
        # The derivative of 1 - 2 u is 4 (u - u^2), where u is the share.
        if has_weight:
          product = share * of_sums
          first = jnp.sum(product, axis=1)
          add_to_sum(block, "weight", channel, total - 2.0 * first)
          of_own = first - jnp.sum(product * share, axis=1)
        else:
          of_own = jnp.sum((share - share * share) * of_sums, axis=1)
        factor = 4.0 * weight[channel]
        add_to_sum(block, "tokens", channel, of_own * factor)
      return state

    for_each_channel(block, self.channels // 2, add, None, most=2)


def additive_sum(channels: int) -> AdditiveSum:
  """The sum over so many channels."""
  is_shared = channels <= _MOST_CHANNELS and channels % 4 == 0
  return (SharedReciprocals if is_shared else AdditiveSum)(channels)


def _exponential(feature: jax.Array) -> jax.Array:
  return jnp.exp2(feature * (2.0 / math.log(2.0)))


def _feature(exponential: jax.Array) -> jax.Array:
  return 0.5 * jnp.log(exponential)


def _is_large(feature: jax.Array) -> jax.Array:
  """Whether products of the exponentials of two channels may overflow."""
  return jnp.logical_not(feature <= _LARGEST)  # also if it is NaN


def _has_large(block: Block) -> jax.Array:
  """Whether a tile of pairs has large features."""
  largest = block.scratch[2]
  return _is_large(jnp.maximum(largest[0], largest[1]))


def _shared_reciprocal(block: Block, pair: Any) -> tuple[jax.Array, ...]:
  """The divisors x and y of a pair of channels, and 1 / (x y)."""
  other, own, _ = block.scratch
  x, y = (
    1.0 + across(left, TILE) * down(right, TILE)
    for left, right in (
      vectors(block, own, other, 2 * pair + n) for n in range(2)
    )
  )
  return x, y, reciprocal(block.problem, x * y)
