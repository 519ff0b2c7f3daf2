"""The positions of a tile's queries and keys."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention.positional.position_arrays import positions


@dataclasses.dataclass(frozen=True, eq=False)
class Positions:
  """The positions of a tile's queries and keys, which are consecutive.

  `Score.pair_at` receives them. In the last tile of a sequence, positions may
  be past the end; their scores are ignored.

  Attributes:
    query_start: the position of the first query, an integer or int32 [].
    key_start: the position of the first key.
    num_queries: t.
    num_keys: s.
    key_length: S, the number of keys of the sequence.
    leading: the indices of the tile's first entry along the leading axes of the
      scores; () if all are 0.
    first_head: the number of heads that are on earlier devices.

  Example:
    >>> tile = Positions(4, 6, num_queries=2, num_keys=3, key_length=9)
    >>> tile.key
    Array([6, 7, 8], dtype=int32)
    >>> query, key = tile.broadcast(rank=2)
    >>> key - query
    Array([[2, 3, 4],
           [1, 2, 3]], dtype=int32)
  """

  query_start: int | jax.Array
  key_start: int | jax.Array
  num_queries: int
  num_keys: int
  key_length: int
  leading: tuple[Any, ...] = ()
  first_head: int | jax.Array = 0
  # How kernels look up products by distance, see `scores.distances`.
  look_up: Callable[..., jax.Array] | None = None

  @property
  def query(self) -> jax.Array:
    """int32 [t]."""
    return jnp.asarray(self.query_start + positions(self.num_queries))

  @property
  def key(self) -> jax.Array:
    """int32 [s]."""
    return jnp.asarray(self.key_start + positions(self.num_keys))

  def broadcast(self, rank: int) -> tuple[jax.Array, jax.Array]:
    """The positions of queries [..., t, 1] and keys [..., 1, s]."""
    ones = (1,) * (rank - 2)
    return (
      self.query.reshape(*ones, -1, 1),
      self.key.reshape(*ones, 1, -1),
    )

  def at_queries(self, numbers: jax.Array) -> jax.Array:
    """Numbers [..., n] by position, those of the queries, [..., t, 1]."""
    if numbers.shape[-1] == 0:  # there is no key
      shape = (*numbers.shape[:-1], self.num_queries, 1)
      return jnp.zeros(shape, numbers.dtype)
    return jnp.take(numbers, self.query, axis=-1, mode="clip")[..., None]

  def at_keys(self, numbers: jax.Array) -> jax.Array:
    """Numbers [..., n] by position, those of the keys, [..., 1, s]."""
    taken = jnp.take(numbers, self.key, axis=-1, mode="clip")
    return taken[..., None, :]

  def with_joined_heads(self) -> "Positions":
    """The positions of a tile with all heads, whose two axes are joined."""
    if not self.leading:
      return self
    return dataclasses.replace(self, leading=(*self.leading[:-2], 0))

  def index(self, axis: int, size: int) -> jax.Array:
    """int32 [size], the indices along a leading axis, -1 for the last."""
    start = self.leading[axis] if len(self.leading) >= -axis else 0
    return jnp.asarray(start + positions(size))


def all_positions(query: jax.Array, key: jax.Array) -> Positions:
  """The positions of all queries [..., T, D] and keys [..., S, D] from 0 on."""
  length = key.shape[-2]
  return Positions(0, 0, query.shape[-2], length, key_length=length)
