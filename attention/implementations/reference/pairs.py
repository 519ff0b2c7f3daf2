"""The mask and the bias of all pairs."""

import jax
import jax.numpy as jnp

from attention.positional.pair_block import PairBlock
from attention.positional.position_arrays import TilePositions, positions
from attention.request import Request


def visible_and_bias(request: Request) -> tuple[jax.Array, list[jax.Array]]:
  """Which pairs are visible, and the bias, finite, if there is one."""
  rank = request.query.ndim
  # Computed positions: constants would become an array of all pairs.
  rows, columns = (
    TilePositions(0, length) if isinstance(length, int) else positions(length)
    for length in request.scores_shape[-2:]
  )
  at = PairBlock(rows, columns, rank - 2)
  visible = jnp.ones((1,) * rank, bool)
  if request.mask is not None:
    visible = jnp.asarray(request.mask.values(at))
  if request.bias is None:
    return visible, []
  bias = request.bias.values(at)
  if request.bias.may_hide:
    allowed = ~jnp.isneginf(bias)
    bias = jnp.where(allowed, bias, 0.0)
    visible = visible & allowed
  return visible, [bias.astype(request.dtype)]


def multiplier(request: Request) -> list[jax.Array]:
  """The factors by which dropout multiplies the weights, if there are any."""
  if request.dropout is None:
    return []
  shape = (*request.leading, *request.scores_shape[-2:])
  return [request.dropout.multiplier(shape, request.dtype)]
