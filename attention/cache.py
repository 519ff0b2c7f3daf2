"""A cache of the keys and values of the tokens decoded so far.

All examples of a batch have one length, or each has its own (`length_shape`).
A rolling cache keeps the last `max_length` tokens only.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated as Shaped
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from attention import masks
from attention.arrays import axes
from attention.biases import Bias, as_bias
from attention.checks import check_positive, check_shape, check_sizes
from attention.types import BiasLike, MaskLike

__all__ = ["Cache", "Extended", "append", "extend", "init"]

# A position after all queries: a causal mask hides it.
_NOWHERE = 2**30


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=("key", "value", "length"),
  meta_fields=("rolling",),
)
@dataclasses.dataclass(frozen=True, eq=False)
class Cache:
  """Keys [..., max_length, D], values [..., max_length, E], int32 length.

  The first `length` positions hold tokens, the others are zeros. The mask
  `masks.causal(offset)`, where `offset` is the number of tokens before the
  queries, hides the empty positions too. A length per example is an array
  [B...], whose axes are the leftmost of the keys.

  If it is `rolling`, the token at position i is stored at i % max_length, where
  it replaces an earlier one; `extend` returns keys in the order of positions.
  """

  key: Shaped[jax.Array, "... max_length D"]
  value: Shaped[jax.Array, "... max_length E"]
  length: Shaped[jax.Array, "B or none"]
  rolling: bool = False

  @property
  def max_length(self) -> int:
    """The maximal number of tokens."""
    return self.key.shape[-2]

  def next_positions(self, count: int) -> jax.Array:
    """The positions of the next tokens, int32 [..., count]."""
    return jnp.add(*axes.aligned(self.length[..., None], jnp.arange(count)))

  @property
  def first_position(self) -> int | jax.Array:
    """The position of the first key that `extend` returns, int32 [...].

    It is negative in a rolling cache that is not full.
    """
    return self.length - self.max_length if self.rolling else 0


class Extended(NamedTuple):
  """A longer cache, and what the new queries attend to; see `extend`."""

  cache: Cache
  key: Shaped[jax.Array, "... S D"]
  value: Shaped[jax.Array, "... S E"]
  mask: masks.Mask
  bias: Bias | None


def init(
  leading_shape: Sequence[int],
  max_length: int,
  key_size: int,
  value_size: int | None = None,
  dtype: DTypeLike = jnp.float32,
  *,
  length_shape: Sequence[int] = (),
  rolling: bool = False,
) -> Cache:
  """An empty cache.

  Args:
    leading_shape: the axes before the positions, for instance (B, K).
    max_length: the maximal number of tokens.
    key_size: the number D of features.
    value_size: E; None means D.
    dtype: of keys and values.
    length_shape: (B,) for a length per example; the first axes of
      `leading_shape`. () means one length for all.
    rolling: whether later tokens replace the earliest ones in a full cache. A
      query then attends to at most `max_length` tokens, its own included.

  Returns:
    A `Cache` of zeros, of length 0.

  Raises:
    ValueError: if a size is not positive, or `leading_shape` does not begin
      with `length_shape`.

  Example:
    >>> init((2, 4), max_length=8, key_size=16).key.shape
    (2, 4, 8, 16)
  """
  check_positive(max_length=max_length, key_size=key_size)
  check_positive(value_size=value_size)
  check_sizes(leading_shape=leading_shape, length_shape=length_shape)
  if tuple(leading_shape[: len(length_shape)]) != tuple(length_shape):
    raise ValueError(
      f"length_shape={tuple(length_shape)} must be the first axes of "
      f"leading_shape={tuple(leading_shape)}"
    )
  value_size = key_size if value_size is None else value_size
  key, value = (
    jnp.zeros((*leading_shape, max_length, size), dtype)
    for size in (key_size, value_size)
  )
  return Cache(key, value, jnp.zeros(length_shape, jnp.int32), rolling)


def append(
  cache: Cache,
  key: Shaped[jax.Array, "... t D"],
  value: Shaped[jax.Array, "... t E"],
  lengths: Shaped[jax.Array, "B"] | None = None,
) -> Cache:
  """Appends new tokens to a cache.

  If the length is traced (under `jax.jit`), tokens past the end raise no error:
  they overwrite the last positions, or are dropped if each example has its own
  length. The length then exceeds `max_length`.

  Args:
    cache: a cache.
    key: [..., t, D].
    value: [..., t, E].
    lengths: int [B...], how many of the t tokens each example has; the others
      are padding, which is not stored. It needs a cache with a length per
      example. None means t.

  Returns:
    The cache, t tokens longer; the old one is unchanged.

  Raises:
    AssertionError: if the shapes do not fit; the message names the argument.
    ValueError: if the tokens do not fit into the cache, or `lengths` is not
      between 0 and t.

  Example:
    >>> import jax.numpy as jnp
    >>> cache = append(init((), 8, 2), jnp.ones((3, 2)), jnp.ones((3, 2)))
    >>> int(cache.length)
    3
  """
  if isinstance(lengths, list | tuple):
    lengths = np.asarray(lengths)
  _check_tokens(cache, key, value, lengths)
  added = np.int32(key.shape[-2]) if lengths is None else lengths
  if not cache.rolling:
    _check_room(cache, added)
  if cache.rolling or cache.length.ndim:
    slots = _slots(cache, key.shape[-2], jnp.asarray(added, jnp.int32))

    def write(buffer, new):
      def one(buffer, new, slots):
        return buffer.at[..., slots, :].set(new, mode="drop")

      for _ in cache.length.shape:
        one = jax.vmap(one)
      return one(buffer, new.astype(buffer.dtype), slots)

  else:

    def write(buffer, new):
      return jax.lax.dynamic_update_slice_in_dim(
        buffer, new.astype(buffer.dtype), cache.length, axis=buffer.ndim - 2
      )

  return dataclasses.replace(
    cache,
    key=write(cache.key, key),
    value=write(cache.value, value),
    length=cache.length + jnp.asarray(added, jnp.int32),
  )


def extend(
  cache: Cache,
  key: Shaped[jax.Array, "... t D"],
  value: Shaped[jax.Array, "... t E"],
  *,
  mask: MaskLike | None = None,
  bias: BiasLike | None = None,
  lengths: Shaped[jax.Array, "B"] | None = None,
) -> Extended:
  """Appends new tokens, and returns what their queries attend to.

  Rows and columns of `mask` and `bias` are positions in the sequence. In a
  rolling cache a query attends to the last `max_length` tokens; the keys are
  then the stored ones and the new ones, in the order of their positions, from
  `cache.first_position` on. A mask with a parameter per example is evaluated
  once more for each example if each has its length.

  Args:
    cache: a cache.
    key: [..., t, D].
    value: [..., t, E].
    mask: as in `attend`; `masks.causal()` is always added.
    bias: as in `attend`.
    lengths: as in `append`.

  Returns:
    `Extended`: the longer cache, and the keys, values, mask and bias for
    `attend`.

  Raises:
    AssertionError: as in `append`.
    ValueError: as in `append`.

  Example:
    >>> import jax.numpy as jnp
    >>> from attention import attend
    >>> tokens, window = jnp.ones((5, 2)), init((), 4, 2, rolling=True)
    >>> window, keys, values, mask, _ = extend(window, tokens, tokens)
    >>> attend(tokens, keys, values, mask=mask).shape
    (5, 2)
    >>> window.key.shape, int(window.length)
    ((4, 2), 5)
  """
  longer = append(cache, key, value, lengths)
  mask = masks.causal() if mask is None else masks.causal() & mask
  bias = None if bias is None else as_bias(bias)
  if not cache.rolling:
    keys, values, columns = longer.key, longer.value, None
  else:
    mask = mask & masks.sliding_window(cache.max_length - 1, None)
    keys, values = (
      jnp.concatenate([_in_order(cache, old), new.astype(old.dtype)], axis=-2)
      for old, new in ((cache.key, key), (cache.value, value))
    )
    columns = jnp.add(
      *axes.aligned(
        jnp.asarray(cache.first_position)[..., None],
        jnp.arange(keys.shape[-2]),
      )
    )
    columns = jnp.where(columns < 0, _NOWHERE, columns)

  def located(pairs):
    if columns is None and cache.length.ndim == 0:
      return pairs.shifted(cache.length)
    return pairs.at(cache.next_positions(key.shape[-2]), columns)

  bias = None if bias is None else located(bias)
  return Extended(longer, keys, values, located(mask), bias)


def _in_order(cache: Cache, buffer: jax.Array) -> jax.Array:
  """What a rolling cache stores, [..., max_length, D], in the order of time."""

  def one(buffer, length):
    return jnp.roll(buffer, -length, axis=-2)

  for _ in cache.length.shape:
    one = jax.vmap(one)
  return one(buffer, cache.length % cache.max_length)


def _slots(cache: Cache, count: int, added: jax.Array) -> jax.Array:
  """Where each new token is stored, int32 [..., count]; past the end: not."""
  positions = cache.next_positions(count)
  number, added = axes.aligned(jnp.arange(count), added[..., None])
  kept = number < added
  if cache.rolling:
    # Of more tokens than there is room for, only the last are stored.
    kept = kept & (number >= added - cache.max_length)
    positions = positions % cache.max_length
  kept, positions = axes.aligned(kept, positions)
  return jnp.where(kept, positions, cache.max_length)


def _check_room(cache: Cache, added) -> None:
  """Raises ValueError if tokens do not fit; unknown numbers count as 0."""
  held, added = np.broadcast_arrays(
    *(
      0 if isinstance(number, jax.core.Tracer) else number
      for number in (cache.length, added)
    )
  )
  total = held + added
  if (total > cache.max_length).any():
    worst = total.argmax()
    raise ValueError(
      f"the cache holds {held.flat[worst]} of max_length={cache.max_length} "
      f"tokens, {added.flat[worst]} more do not fit"
    )


def check_cache(cache: Any) -> None:
  """Raises TypeError unless it is a `Cache`."""
  if not isinstance(cache, Cache):
    raise TypeError(
      "cache must be a Cache, from attention.cache.init or a module's "
      f"init_cache, got {cache!r}"
    )


def _check_tokens(cache: Cache, key, value, lengths) -> None:
  """Raises unless it is a cache, and the shapes fit it."""
  check_cache(cache)
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
  if lengths is None:
    return
  if not cache.length.ndim or jnp.shape(lengths) != cache.length.shape:
    raise AssertionError(
      f"lengths has shape {jnp.shape(lengths)}, but the cache has lengths of "
      f"shape {cache.length.shape}; a length per example needs "
      "cache.init(..., length_shape=(B,)), or a module's "
      "init_cache(..., ragged=True)"
    )
  if not isinstance(lengths, jax.core.Tracer):
    lengths = np.asarray(lengths)
  if not jnp.issubdtype(lengths.dtype, jnp.integer):
    raise ValueError(f"lengths must be integers, got {lengths.dtype}")
  is_known = isinstance(lengths, np.ndarray)
  if is_known and ((lengths < 0) | (lengths > added)).any():
    raise ValueError(
      f"lengths must be between 0 and the {added} new tokens, got {lengths}"
    )
