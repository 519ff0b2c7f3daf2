"""The factors of dropout for one tile, inside a kernel.

They equal those of other implementations: a factor depends on the random key
and on the position of its weight alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from attention import dropout as dropouts
from attention.implementations.pallas.operands import Kind, Source, Unsupported
from attention.request import Request

# Constants of Threefry-2x32, see `_threefry`.
_PARITY = 0x1BD11BDA
_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)


@dataclasses.dataclass(frozen=True)
class Place:
  """Where the weights of a tile lie among all weights of `shape`."""

  source: Source
  rows: jax.Array  # int32 [t, 1]
  columns: jax.Array  # int32 [1, s]
  number: Any  # the flat index of the leading axes
  shape: tuple[int, ...]
  words: Sequence[jax.Array]  # of the key of the hash

  def scalar(self, number: Any) -> Any:
    """An integer that may be traced."""
    if isinstance(number, int):
      return number
    return self.source.read(number, Kind.SCALAR, ())


# (source, queries, keys, indices of the leading axes) -> numbers of pairs.
OfPairs = Callable[[Source, jax.Array, jax.Array, Sequence[Any]], jax.Array]


def of_request(dropout: dropouts.Dropout, request: Request) -> OfPairs:
  """The factors of the weights of a request, for positions that broadcast."""
  shape = (*request.leading, *request.scores_shape[-2:])
  words = _words_of(dropout)

  def of_pairs(source, queries, keys, indices):
    number = 0
    for index, size in zip(indices, request.leading):
      number = number * size + index
    place = Place(source, queries, keys, number, shape, words)
    return factors(dropout, place).astype(request.dtype)

  return of_pairs


def _words_of(dropout: dropouts.Dropout) -> list[jax.Array]:
  """The two words of a dropout's key, int32."""
  while isinstance(dropout, dropouts.PartDropout | dropouts.GroupDropout):
    dropout = dropout.whole
  if not isinstance(dropout, dropouts.InvertedDropout):
    raise Unsupported(f"does not support {type(dropout).__name__}")
  return [*dropout.words.astype(jnp.int32)]


@functools.singledispatch
def factors(dropout: dropouts.Dropout, place: Place) -> jax.Array:
  """0 or 1 / (1 - rate) for the weights [t, s] of a tile."""
  raise Unsupported(f"does not support {type(dropout).__name__}")


@factors.register
def _(dropout: dropouts.InvertedDropout, place: Place):
  *leading, length, key_length = place.shape
  number = 0 if dropout.shared else place.number
  leading = [] if dropout.shared else leading
  key: Sequence[Any] = [*map(place.scalar, place.words)]
  rows = place.rows + number * length
  columns = place.columns
  if math.prod([*leading, length, key_length]) > 2**32:
    key = _threefry(key, rows)
  else:
    columns = columns + rows * key_length
  left, right = _threefry(key, columns)
  words = jax.lax.shift_right_logical(left ^ right, jnp.int32(9))
  uniform = words.astype(jnp.float32) * 2.0**-23
  return jnp.where(uniform < 1.0 - dropout.rate, dropout.kept, 0.0)


@factors.register
def _(dropout: dropouts.PartDropout, place: Place):
  whole = dataclasses.replace(
    place,
    rows=place.rows + place.scalar(dropout.row),
    columns=place.columns + place.scalar(dropout.column),
    shape=(*place.shape[:-2], *dropout.lengths),
  )
  return factors(dropout.whole, whole)


@factors.register
def _(dropout: dropouts.GroupDropout, place: Place):
  number, shape = dropout.of_all(
    place.number, place.shape, place.scalar(dropout.index)
  )
  whole = dataclasses.replace(place, number=number, shape=shape)
  return factors(dropout.whole, whole)


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
