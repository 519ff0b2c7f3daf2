"""A cache of the keys and values of the tokens decoded so far."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attention.checks import check_positive, check_shape

__all__ = ["Cache", "append", "init"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
  """Keys [..., max_length, D], values [..., max_length, E], int32 length.

  The first `length` positions hold tokens, the others are zeros. The mask
  `masks.causal(offset)`, where `offset` is the number of tokens before the
  queries, hides the empty positions too.
  """

  key: jax.Array
  value: jax.Array
  length: jax.Array

  @property
  def max_length(self) -> int:
    """The maximal number of tokens."""
    return self.key.shape[-2]


def init(
  leading_shape: Sequence[int],
  max_length: int,
  key_size: int,
  value_size: int | None = None,
  dtype: DTypeLike = jnp.float32,
) -> Cache:
  """An empty cache.

  Args:
    leading_shape: the axes before the positions, for instance (B, K).
    max_length: the maximal number of tokens.
    key_size: D.
    value_size: E; None means D.
    dtype: of keys and values.

  Returns:
    A `Cache` of zeros, of length 0.

  Raises:
    ValueError: if `max_length` is not positive.

  Example:
    >>> init((2, 4), max_length=8, key_size=16).key.shape
    (2, 4, 8, 16)
  """
  check_positive(max_length=max_length)
  value_size = key_size if value_size is None else value_size
  key, value = (
    jnp.zeros((*leading_shape, max_length, size), dtype)
    for size in (key_size, value_size)
  )
  return Cache(key, value, jnp.zeros((), jnp.int32))


def append(cache: Cache, key: jax.Array, value: jax.Array) -> Cache:
  """Appends new tokens to a cache.

  If the length is traced, under `jax.jit`, no error can be raised: tokens past
  the end overwrite the last positions, and the length exceeds `max_length`.

  Args:
    cache: a cache.
    key: [..., t, D].
    value: [..., t, E].

  Returns:
    The cache, t tokens longer; the old one is unchanged.

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.
    ValueError: if the tokens do not fit into the cache.

  Example:
    >>> import jax.numpy as jnp
    >>> cache = append(init((), 8, 2), jnp.ones((3, 2)), jnp.ones((3, 2)))
    >>> int(cache.length)
    3
  """
  size, value_size = cache.key.shape[-1], cache.value.shape[-1]
  check_shape("key", key, length=None, features=size, fits="cache")
  added = key.shape[-2]
  check_shape("value", value, length=added, features=value_size, fits="key")
  for name, new, old in (
    ("key", key, cache.key),
    ("value", value, cache.value),
  ):
    if new.shape[:-2] != old.shape[:-2]:
      raise AssertionError(
        f"{name} has leading axes {new.shape[:-2]}, the cache has "
        f"{old.shape[:-2]}"
      )
  is_traced = isinstance(cache.length, jax.core.Tracer)
  held = 0 if is_traced else int(cache.length)
  if held + added > cache.max_length:
    raise ValueError(
      f"the cache holds {held} of max_length={cache.max_length} tokens, "
      f"{added} more do not fit"
    )

  def write(buffer, new):
    return jax.lax.dynamic_update_slice_in_dim(
      buffer, new.astype(buffer.dtype), cache.length, axis=buffer.ndim - 2
    )

  return Cache(
    write(cache.key, key), write(cache.value, value), cache.length + added
  )
