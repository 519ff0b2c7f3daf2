"""NaN and infinity in tokens, in the kernels for Hopper GPUs.

A hidden token must change nothing, but 0 * NaN is NaN. If keys may be hidden, a
block first computes from tokens as they are. Its results are finite unless a
token that it has loaded is not. Only then it computes them again, with zeros in
place of NaN and infinity, and flags the rows that attend to such tokens. A
block that adds to an array cannot repeat that, and has the second attempt only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from attention.implementations.pallas.hopper.tiles.device import Device
from attention.implementations.pallas.hopper.tiles.layout import (
  BY_ROW,
  WGMMA,
  Axes,
  pieces,
)


def attempts(
  problem: Any,
  compute: Callable[[Any], jax.Array],
  *,
  always_masked: bool = False,
) -> None:
  """Runs compute(is_second), a second time if a result was not finite.

  If `always_masked` it runs once, as the second attempt.
  """
  # compute returns numbers [64], 0 where all results of a token are finite.
  if not problem.is_masked:
    compute(None)
    return
  if always_masked:
    compute(True)
    return

  def attempt(number):
    not_finite = jnp.max(compute(number > 0), axis=0) > 0.0
    return jnp.where(not_finite, number + 1, 2)

  jax.lax.while_loop(lambda number: number < 2, attempt, jnp.int32(0))


def not_finite(device: Device, results: Sequence[jax.Array]) -> jax.Array:
  """1 for tokens with a result [64] or [64, n] that is not finite, else 0."""
  flags = device.zeros()
  for each in results:
    own = _is_not_finite(each)
    own = own if own.ndim == 1 else jnp.max(own, axis=1)
    flags = jnp.maximum(flags, own)
  return flags


def make_finite(device: Device, tile: Any, axes: Axes) -> jax.Array:
  """Replaces NaN and infinity by 0; returns 1 for tokens that had some."""
  if axes is Axes.TOKENS:
    flags = device.zeros()
    # All features at once would need too many registers.
    for place in pieces(tile.shape[-1]):
      part = tile.at[:, place]
      numbers = device.cast(part[...].astype(jnp.float32), WGMMA)
      own = _is_not_finite(numbers)
      part[...] = jnp.where(own > 0.0, 0.0, numbers).astype(tile.dtype)
      flags = jnp.maximum(flags, jnp.max(own, axis=1))
    return flags

  def clean(channel, flags):
    numbers = device.cast(tile[channel], BY_ROW)
    own = _is_not_finite(numbers)
    tile[channel] = jnp.where(own > 0.0, 0.0, numbers)
    return jnp.maximum(flags, own)

  zeros = device.zeros()
  return jax.lax.fori_loop(0, tile.shape[0], clean, zeros)


def when(condition: Any) -> Callable[[Callable], Any]:
  """`pl.when`, where None is never."""
  return (lambda function: None) if condition is None else pl.when(condition)


def _is_not_finite(numbers: jax.Array) -> jax.Array:
  # Python's numbers would have 64 bits under `jax_enable_x64`.
  zero, one = jnp.float32(0.0), jnp.float32(1.0)
  return jnp.where(jnp.abs(numbers) < np.inf, zero, one)
