"""Scores of Hopper kernels that are sums over the features of tokens.

Such a score is f(sum_c g(q_c, k_c)), for instance an additive score or the
negative distance of two tokens. Kernels add g for one feature, or channel,
after the other.
"""

from collections.abc import Callable
from typing import Any

import jax

from attention.implementations.pallas.hopper.block.block import Block
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_COLUMN,
  BY_ROW,
  TILE,
  across,
  down,
)


class ChannelSum:
  """The sum of a score over the channels of a tile, and its gradients."""

  def scratch(self) -> Any:
    """Shared memory of a block, besides its tiles."""
    return ()

  def prepare(self, block: Block, *, of_own: bool) -> None:
    """Called when a tile of own or other tokens is loaded or changed."""

  def sums(self, block: Block) -> jax.Array:
    """The sums of all pairs of a tile."""
    raise NotImplementedError

  def sums_of_pairs(self, block: Block, channel: Any) -> jax.Array:
    """The sums q_c + k_c of all pairs of a tile."""
    own, other = vectors(block, *block.own_and_other, channel)
    return across(own, TILE) + down(other, TILE)

  def add_gradients(self, block: Block, of_sums: jax.Array) -> None:
    """Adds to the gradients of channels."""
    raise NotImplementedError


def for_each_channel(
  block: Block, channels: int, body: Callable, state: Any, *, most: int = 4
) -> Any:
  """The state after body(channel, state), with several in an iteration."""
  # With a mask or a bias, the kernel of keys has too few registers for as many.
  problem = block.problem
  has_more = problem.is_masked or problem.bias is not None
  is_scarce = block.are_keys_own and has_more
  count = most // 2 if is_scarce else most
  count = count if channels % count == 0 else 1

  def several(number, state):
    for offset in range(count):
      state = body(number * count + offset, state)
    return state

  return jax.lax.fori_loop(0, channels // count, several, state)


def add_to_sum(block: Block, name: str, channel: Any, part) -> None:
  """Adds to one channel of the gradients of own tokens, or of a weight."""
  result = block.channel_sums[name]
  before = block.problem.cast(result[channel], BY_ROW)
  result[channel] = before + part


def vectors(
  block: Block, own: Any, other: Any, channel: Any
) -> tuple[jax.Array, jax.Array]:
  """A feature of own tokens and of other tokens."""
  cast = block.problem.cast  # to be called at once on what is read
  return cast(own[channel], BY_ROW), cast(other[channel], BY_COLUMN)
