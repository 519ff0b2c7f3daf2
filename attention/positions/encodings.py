"""Encodings of positions in tokens: sinusoidal and rotary."""

import dataclasses
import functools
from typing import Annotated as Shaped
from typing import Literal

import chex
import jax
import jax.numpy as jnp
import numpy as np

from attention.arrays import axes
from attention.checks import (
  check_above_zero,
  check_integers,
  check_positive,
  check_tokens,
)
from attention.positions.frequency_scaling import (
  FrequencyScaling,
  unscaled_frequencies,
)

# Elements of tokens up to which tables of angles are constants of a program.
_MAX_TABLE_SIZE = 2**20


def _check_even(name: str, size: int) -> None:
  if size % 2:
    raise ValueError(
      f"{name} must be even, got {size}: sines and cosines alternate"
    )


def sinusoidal(length: int, features: int) -> Shaped[jax.Array, "T D"]:
  """A table of sines and cosines to add to embeddings.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.5
  (https://arxiv.org/abs/1706.03762).

  Args:
    length: T, the number of positions.
    features: D, even.

  Returns:
    [T, D], sines in the even columns and cosines in the odd ones.

  Raises:
    ValueError: if `features` is odd, or a size negative.

  Example:
    >>> sinusoidal(2, 2).round(3)
    Array([[0.   , 1.   ],
           [0.841, 0.540...]], dtype=float32)
  """
  check_integers(length=length, features=features)
  for name, size in (("length", length), ("features", features)):
    if size < 0:
      raise ValueError(f"{name} must be at least 0, got {size}")
  _check_even("features", features)
  # float64, as float32 angles at large positions have inaccurate sines.
  frequencies = 10000.0 ** (-np.arange(0, features, 2) / max(features, 1))
  angles = np.arange(length)[:, None] * frequencies
  table = np.stack([np.sin(angles), np.cos(angles)], axis=-1)
  return jnp.asarray(table.reshape(length, features))


@dataclasses.dataclass(frozen=True)
class RotaryOptions:
  """Which features rotary positions rotate, and by which angles.

  Attributes:
    base: pair m of d rotated features turns by base ** (-2m / d) per position.
    rotary_dim: the number of rotated features, the first ones; the others keep
      their values. None means all.
    pairs: the features that make a pair: 2m and 2m + 1 if "interleaved" (the
      paper, GPT-J, Meta's Llama weights); m and m + d / 2 if "half_split"
      (GPT-NeoX, Llama weights in the format of Hugging Face).
    scaling: changes the frequencies for longer sequences than trained:
      `LinearScaling`, `NTKScaling`, `YaRNScaling`, `Llama3Scaling`, or None.
    max_length: positions that are passed as arrays are integers from 0 to this
      number, exclusive; others give NaN. Cosines and sines are then read from a
      table, which is faster when decoding, where XLA would compute them for
      every example. None means no limit and no table.

  Raises:
    ValueError: if `pairs` is unknown, `rotary_dim` is not positive and even, or
      `max_length` is not positive.

  Example:
    >>> llama = RotaryOptions(500000.0, pairs="half_split")
    >>> rotary(jnp.ones((3, 8)), options=llama).shape
    (3, 8)
  """

  base: float = 10000.0
  rotary_dim: int | None = None
  pairs: Literal["interleaved", "half_split"] = "interleaved"
  scaling: FrequencyScaling | None = None
  max_length: int | None = None

  def __post_init__(self):
    if self.pairs not in ("interleaved", "half_split"):
      raise ValueError(
        f"pairs must be 'interleaved' or 'half_split', got {self.pairs!r}"
      )
    if not isinstance(self.scaling, FrequencyScaling | None):
      raise TypeError(
        f"scaling must be a FrequencyScaling, got {self.scaling!r}"
      )
    check_above_zero(base=self.base)
    check_positive(rotary_dim=self.rotary_dim, max_length=self.max_length)
    _check_even("rotary_dim", self.rotary_dim or 0)

  def frequencies(self, features: int) -> np.ndarray:
    """The angle per position of each pair, for tokens with `features`."""
    size = self._rotated(features)
    if self.scaling is None:
      return unscaled_frequencies(self.base, size)
    return self.scaling.frequencies(self.base, size)

  @property
  def magnitude(self) -> float:
    """The factor of rotated features."""
    return 1.0 if self.scaling is None else self.scaling.magnitude

  def split(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The first and the second of all pairs, and the features not rotated."""
    size = self._rotated(x.shape[-1])
    x, rest = x[..., :size], x[..., size:]
    leading, half = x.shape[:-1], size // 2
    if self.pairs == "half_split":
      x = jnp.reshape(x, (*leading, 2, half))
      return x[..., 0, :], x[..., 1, :], rest
    x = jnp.reshape(x, (*leading, half, 2))
    return x[..., 0], x[..., 1], rest

  def join(
    self, first: jax.Array, second: jax.Array, rest: jax.Array
  ) -> jax.Array:
    """The inverse of `split`."""
    axis = -2 if self.pairs == "half_split" else -1
    rotated = jnp.stack([first, second], axis=axis)
    shape = (*first.shape[:-1], 2 * first.shape[-1])
    return jnp.concatenate([jnp.reshape(rotated, shape), rest], axis=-1)

  def _rotated(self, features: int) -> int:
    """The number of rotated features."""
    if self.rotary_dim is None:
      _check_even("the number of features of x", features)
      return features
    if self.rotary_dim > features:
      raise ValueError(
        f"rotary_dim={self.rotary_dim} must be at most the number of features"
        f" of x, {features}"
      )
    return self.rotary_dim


def rotary(
  x: Shaped[jax.Array, "... T D"],
  positions: Shaped[jax.Array, "... T"] | None = None,
  base: float | None = None,
  options: RotaryOptions | None = None,
) -> Shaped[jax.Array, "... T D"]:
  """Rotates pairs of features by angles proportional to the position.

  The dot product of two rotated tokens depends only on their distance. See
  "RoFormer", Su et al., 2021, equation 34 (https://arxiv.org/abs/2104.09864).

  Args:
    x: [..., T, D] queries or keys.
    positions: [..., T], broadcasts to x without its features; None means 0 to
      T - 1.
    base: replaces the base of `options`; None keeps it.
    options: the rotated features, the pairs and the frequencies; None means
      `RotaryOptions()`: all features, pairs of neighbours, base 10000.

  Returns:
    [..., T, D] in the dtype of x.

  Raises:
    AssertionError: if `x` or `positions` have a wrong shape or dtype.
    ValueError: if D is odd and all features are rotated, or D is less than
      `options.rotary_dim`.

  Example:
    >>> import jax.numpy as jnp
    >>> rotary(jnp.array([[1.0, 0.0], [1.0, 0.0]])).round(3)
    Array([[1.   , 0.   ],
           [0.540..., 0.841]], dtype=float32)
  """
  check_tokens(x=x)
  x = jnp.asarray(x)
  options = RotaryOptions() if options is None else options
  if not isinstance(options, RotaryOptions):
    raise TypeError(f"options must be RotaryOptions, got {options!r}")
  if base is not None:
    options = dataclasses.replace(options, base=base)
  dtype = jnp.promote_types(x.dtype, jnp.float32)
  cosine, sine = _turns(x, positions, options, dtype)
  first, second, rest = options.split(x.astype(dtype))
  rotated = options.join(
    first * cosine - second * sine, first * sine + second * cosine, rest
  )
  return rotated.astype(x.dtype)


def _turns(x, positions, options: RotaryOptions, dtype):
  """Cosines and sines of the angles of x [..., T, D], [..., T, d / 2]."""
  length, features = x.shape[-2:]
  frequencies = options.frequencies(features)

  def table(length: int) -> jax.Array:
    rows = _turn_table(length, tuple(frequencies.tolist()), options.magnitude)
    return jnp.asarray(rows, dtype)

  # XLA's CPU backend would compute the cosines for every example and head.
  is_known = isinstance(length, int)  # not a symbol of `jax.export`
  if positions is None and is_known and length * features <= _MAX_TABLE_SIZE:
    return [axes.with_rank(each, x.ndim) for each in table(length)]
  if positions is None:
    positions = jnp.arange(length)
  positions = axes.with_rank(jnp.asarray(positions), x.ndim - 1)
  chex.assert_is_broadcastable(
    positions.shape,
    x.shape[:-1],
    custom_message="positions must broadcast to x without its features",
  )
  limit = options.max_length
  if limit is not None:
    inside = ((positions >= 0) & (positions < limit))[..., None]
    is_integer = jnp.issubdtype(positions.dtype, jnp.integer)
    if is_integer and limit * features <= _MAX_TABLE_SIZE:
      rows = table(limit).at[:, positions].get(mode="clip")
      return jnp.where(inside[None], rows, jnp.nan)
  angles = positions[..., None].astype(dtype)
  angles = angles * axes.with_rank(jnp.asarray(frequencies, dtype), x.ndim)
  if limit is not None:
    angles = jnp.where(inside, angles, jnp.nan)
  return options.magnitude * jnp.cos(angles), options.magnitude * jnp.sin(
    angles
  )


@functools.lru_cache(maxsize=16)
def _turn_table(
  length: int, frequencies: tuple[float, ...], magnitude: float
) -> np.ndarray:
  """Cosines and sines, float64 [2, length, d / 2], of 0 to length - 1."""
  # float64, as float32 angles at large positions have inaccurate sines.
  angles = np.arange(length)[:, None] * np.array(frequencies)
  return magnitude * np.stack([np.cos(angles), np.sin(angles)])
