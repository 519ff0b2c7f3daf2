"""Dropout of attention weights."""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from attention.arrays import axes

_HASH = "threefry2x32"
_fold_in = jax.vmap(jax.random.fold_in, (None, 0))


class Place(NamedTuple):
  """Where a block of weights lies among all weights of `shape`."""

  # int32 arrays that broadcast to the block; `numbers` are the flat indices of
  # its leading entries.
  rows: Any
  columns: Any
  numbers: Any
  shape: tuple[int, ...]


class Random(Protocol):
  """The source of random numbers, which kernels compute in their own way."""

  def scalar(self, number: Any) -> Any:
    """An integer that may be traced."""

  def uniform(self, rng: jax.Array, *positions: jax.Array) -> jax.Array:
    """Uniform in [0, 1), by the hash of positions; of two, by one of both."""


class Dropout:
  """The factors by which dropout multiplies blocks of attention weights."""

  def multiplier(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """0 or 1 / (1 - rate) for all weights of `shape`."""
    *leading, length, key_length = shape
    numbers = jnp.arange(math.prod(leading)).reshape(leading)
    rows, columns = jnp.arange(length), jnp.arange(key_length)
    return self.block(rows, columns, numbers, shape, dtype)

  def block(self, rows, columns, numbers, shape, dtype) -> jax.Array:
    """The factors [..., t, s] of a block; `shape` is that of all weights."""
    # Positions are `rows` [t], `columns` [s], and those of the block's leading
    # entries, as flat indices, `numbers` [...].
    numbers = _int32(numbers)[..., None, None]
    rows = axes.with_rank(_int32(rows[:])[:, None], numbers.ndim)
    columns = axes.with_rank(_int32(columns[:])[None, :], numbers.ndim)
    place = Place(rows, columns, numbers, shape)
    return self.factors(place, _Threefry()).astype(dtype)

  def factors(self, place: Place, random: Random) -> jax.Array:
    """The factors of the weights at a place."""
    raise NotImplementedError

  @property
  def typed_rng(self) -> jax.Array:
    """The key of the hash."""
    raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class InvertedDropout(Dropout):
  """Inverted dropout: kept weights are divided by 1 - rate."""

  rate: float = dataclasses.field(metadata={"static": True})
  rng: jax.Array
  # One draw for all leading axes, which Flax calls broadcast dropout.
  shared: bool = dataclasses.field(default=False, metadata={"static": True})

  def factors(self, place, random):
    # See Srivastava et al., 2014, section 10. The hash of a position is that of
    # `jax.random.bernoulli(rng, 1 - rate, shape)`.
    rows, columns, numbers, (*leading, length, key_length) = place
    if self.shared:
      numbers, leading = 0, []
    # Positions are the bits of unsigned numbers.
    rows = rows + numbers * length
    sizes = [*leading, length, key_length]
    # Sizes that are symbols of `jax.export` are assumed to be small.
    is_known = all(isinstance(size, int) for size in sizes)
    if not is_known or math.prod(sizes) <= 2**32:
      positions = [columns + rows * key_length]
    else:  # a position needs more than 32 bits: hash row and column
      positions = [rows, columns]
    keep = random.uniform(self.typed_rng, *positions) < 1.0 - self.rate
    kept = 1.0 / (1.0 - self.rate) if self.rate < 1.0 else 0.0
    return jnp.where(keep, kept, 0.0)

  @property
  def typed_rng(self):
    rng = self.rng
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
      rng = jax.random.wrap_key_data(rng)
    if str(jax.random.key_impl(rng)) == _HASH:
      return rng
    # With other generators, `fold_in` does not hash.
    data = jax.random.bits(rng, (2,), jnp.uint32)
    return jax.random.wrap_key_data(data, impl=_HASH)


@dataclasses.dataclass(frozen=True, eq=False)
class _OfWhole(Dropout):
  """The dropout of some of the weights of `whole`."""

  whole: Dropout

  @property
  def typed_rng(self):
    return self.whole.typed_rng


@dataclasses.dataclass(frozen=True, eq=False)
class PartDropout(_OfWhole):
  """The dropout of a part of the weights that starts at `row`, `column`."""

  row: jax.Array
  column: jax.Array
  lengths: tuple[int, int]

  def factors(self, place, random):
    place = Place(
      place.rows + random.scalar(self.row),
      place.columns + random.scalar(self.column),
      place.numbers,
      (*place.shape[:-2], *self.lengths),
    )
    return self.whole.factors(place, random)


@dataclasses.dataclass(frozen=True, eq=False)
class GroupDropout(_OfWhole):
  """The dropout of one of `count` equal groups along a leading axis."""

  index: jax.Array
  count: int
  axis: int  # 0 for examples [B, ...], or from the right, -1 for heads [..., H]

  def factors(self, place, random):
    *leading, length, key_length = place.shape
    index, numbers = random.scalar(self.index), place.numbers
    axis = self.axis % len(leading)
    # The entries of the group, for one index along the axes before it.
    size = math.prod(leading[axis:])
    if axis:
      index = index + numbers // size * self.count
      numbers = numbers % size
    leading[axis] *= self.count
    place = place._replace(
      numbers=index * size + numbers, shape=(*leading, length, key_length)
    )
    return self.whole.factors(place, random)


class _Threefry:
  """`Random` by the operations of `jax.random`."""

  def scalar(self, number):
    """The same."""
    return number

  def uniform(self, rng, *positions):
    """See `Random`."""
    *rows, last = (each.astype(jnp.uint32) for each in positions)
    if not rows:
      return _uniform(_words(rng, last))
    rngs = _fold_in(rng, rows[0].ravel())
    words = jax.vmap(_words, (0, None))(rngs, last.ravel())
    return _uniform(words.reshape(*rows[0].shape[:-1], -1))


def _int32(integers) -> jax.Array:
  return jnp.asarray(integers).astype(jnp.int32)


def _words(rng, numbers):
  """A random word for each number, as `jax.random.bits` draws them."""
  data = jax.random.key_data(_fold_in(rng, numbers.ravel()))
  return (data[..., 0] ^ data[..., 1]).reshape(numbers.shape)


def _uniform(words):
  """Uniform in [0, 1), from the leading 23 bits."""
  ones = jax.lax.bitcast_convert_type(
    (words >> 9) | np.uint32(0x3F800000), jnp.float32
  )
  return ones - 1.0


def make_dropout(
  rate: float, rng: jax.Array | None, shared: bool = False
) -> Dropout | None:
  """Inverted dropout, or None if the rate is 0."""
  try:
    if isinstance(rate, str):  # `float` would parse it
      raise TypeError
    rate = float(rate)
  except (TypeError, ValueError):
    raise TypeError(
      f"dropout_rate must be a number that is known when tracing, got {rate!r}"
    ) from None
  if not 0.0 <= rate <= 1.0:
    raise ValueError(f"dropout_rate must be from 0 to 1, got {rate}")
  if rate == 0.0:
    return None
  if rng is None:
    raise ValueError(
      f"dropout_rate={rate} needs rng, for instance jax.random.key(0)"
    )
  if not isinstance(rng, jax.Array | np.ndarray):
    raise TypeError(
      f"rng must be a random key, for instance jax.random.key(0), got {rng!r}"
    )
  typed = jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
  if rng.ndim != (0 if typed else 1):
    raise TypeError(f"rng must be one random key, got shape {rng.shape}")
  if not typed:
    try:
      jax.eval_shape(jax.random.wrap_key_data, rng)
    except TypeError:
      raise TypeError(
        "rng must be a random key, for instance jax.random.key(0), got an array"
        f" of {rng.dtype} and shape {rng.shape}"
      ) from None
  return InvertedDropout(rate, rng, shared)
