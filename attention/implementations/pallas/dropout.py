"""The factors of dropout for one tile, inside a kernel.

They equal those of other implementations: a factor depends on the random key
and on the position of its weight alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention.dropout import Dropout, Place
from attention.implementations.pallas.operands import (
  Kind,
  OfPairs,
  Operand,
  Source,
)
from attention.request import Request

# Constants of Threefry-2x32, see `_threefry`.
_PARITY = 0x1BD11BDA
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


@dataclasses.dataclass(frozen=True)
class _Random:
  """The source of random numbers in a kernel; see `dropout.Random`."""

  source: Source
  words: Sequence[jax.Array]  # of the key of the hash, int32

  def scalar(self, number: Any) -> Any:
    """An integer that may be traced."""
    if isinstance(number, int):
      return number
    return self.source(Operand(jnp.asarray(number), Kind.SCALAR, ()))

  def uniform(self, rng: jax.Array, *positions: jax.Array) -> jax.Array:
    """Those of the hash of positions, with `words` in place of the key."""
    del rng
    words: Sequence[Any] = [*map(self.scalar, self.words)]
    for each in positions:
      words = _threefry(words, each)
    left, right = words
    bits = jax.lax.shift_right_logical(left ^ right, jnp.int32(9))
    return bits.astype(jnp.float32) * 2.0**-23


def factors(dropout: Dropout, request: Request) -> OfPairs:
  """The factors of the weights of a request, for positions that broadcast."""
  shape = (*request.leading, *request.scores_shape[-2:])
  words = [*jax.random.key_data(dropout.typed_rng).astype(jnp.int32)]

  def of_pairs(source, queries, keys, indices):
    number = 0
    for index, size in zip(indices, request.leading):
      number = number * size + index
    place = Place(queries, keys, number, shape)
    return dropout.factors(place, _Random(source, words)).astype(request.dtype)

  return of_pairs


def _threefry(key: Sequence[Any], number: jax.Array) -> tuple[Any, Any]:
  """The two words of Threefry-2x32 for a key and the counter (0, number).

  See "Parallel Random Numbers: As Easy as 1, 2, 3", Salmon et al., 2011. All
  are int32, with the bits of the unsigned numbers.
  """
  # `jax.random` has an operation for it, which kernels do not have.
  first, second = key
  keys = first, second, first ^ second ^ jnp.int32(_PARITY)
  left, right = jnp.zeros_like(number) + keys[0], number + keys[1]
  for step in range(1, 6):
    for bits in _ROTATIONS[(step - 1) % 2]:
      left = left + right
      right = left ^ _rotated(right, bits)
    left = left + keys[step % 3]
    right = right + keys[(step + 1) % 3] + jnp.int32(step)
  return left, right


def _rotated(word: jax.Array, bits: int) -> jax.Array:
  high = jax.lax.shift_left(word, jnp.int32(bits))
  return high | jax.lax.shift_right_logical(word, jnp.int32(32 - bits))
