"""A block of pairs at which masks and biases are evaluated, in JAX arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.positional.position_arrays import taken
from attention.transforms.function_pytree import called


@dataclasses.dataclass(frozen=True, eq=False)
class PairBlock:
  """The pairs of rows, int32 [t], and columns, int32 [s].

  All arrays have `rank` leading axes, those of the scores. Kernels have
  `pallas.pair_tile.Tile` in its place.
  """

  rows: Any
  columns: Any
  rank: int

  @property
  def queries(self) -> Any:
    """The positions of queries, [..., t, 1]."""
    return self.rows[:].reshape(*[1] * self.rank, -1, 1)

  @property
  def keys(self) -> Any:
    """The positions of keys, [..., 1, s]."""
    return self.columns[:].reshape(*[1] * self.rank, 1, -1)

  def leftmost(self, parameter: Any) -> Any:
    """A number, or [B...] for the leftmost leading axes, for all pairs."""
    if isinstance(parameter, int):
      return parameter
    return axes.leading_aligned(parameter, self.rank, 0)[..., None, None]

  def of_heads(self, parameter: Any) -> Any:
    """A number, or [..., H] for the rightmost leading axes, for all pairs."""
    if isinstance(parameter, int | float):
      return parameter
    return self._with_rank(jnp.asarray(parameter)[..., None, None])

  def of_array(self, pairs: Any) -> jax.Array:
    """The block of an array [..., T, S] of a mask or bias."""
    found = taken(taken(pairs.array, self.columns, -1), self.rows, -2)
    return self._with_rank(found)

  def of_tokens(self, mask: Any) -> tuple[jax.Array, jax.Array]:
    """The segments of queries [..., t, 1] and of keys [..., 1, s]."""
    ids, index = (mask.query_ids, mask.key_ids), (self.rows, self.columns)
    query_ids, key_ids = (
      taken(axes.leading_aligned(each, self.rank, 1), own, -1)
      for each, own in zip(ids, index)
    )
    return query_ids[..., :, None], key_ids[..., None, :]

  def of_distances(self, bias: Any) -> jax.Array:
    """The numbers of a bias by distance or by bucket."""
    far, numbers = bias.max_distance, bias.by_distance.numbers
    distance = jnp.clip(self.columns[None, :] - self.rows[:, None], -far, far)
    return self._with_rank(jnp.take(numbers, distance + far, axis=1))

  def of_function(self, function: Callable) -> jax.Array:
    """The values of a function of `masks.where`."""
    visible = called(function, self.queries, self.keys)
    if jnp.result_type(visible) != jnp.bool_:
      raise TypeError(
        "the function of masks.where must return booleans, it returned "
        f"{jnp.result_type(visible)}"
      )
    return self._with_rank(jnp.asarray(visible))

  def of_block(self, pairs: Any) -> jax.Array:
    """The values of a mask or bias that defines `block`."""
    return self._with_rank(pairs.block(self.rows, self.columns, self.rank))

  def shifted(self, shift: Any) -> "PairBlock":
    """The pairs at shifted positions."""
    rows, columns = shift.moved(self.rows, self.columns)
    return PairBlock(rows, columns, self.rank)

  def of_transform(self, change: Any, inner: Any) -> jax.Array:
    """The values of a mask or bias that a transform changes."""
    block = change.block(inner, self.rows, self.columns, self.rank)
    return self._with_rank(block)

  def _with_rank(self, array: jax.Array) -> jax.Array:
    return axes.with_rank(array, self.rank + 2)
