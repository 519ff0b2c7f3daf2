"""Scaled frequencies of rotary positions, for longer sequences than trained."""

import dataclasses
import math

import numpy as np

from attention.checks import check_above_zero, check_numbers

__all__ = [
  "FrequencyScaling",
  "LinearScaling",
  "Llama3Scaling",
  "NTKScaling",
  "YaRNScaling",
]


@dataclasses.dataclass(frozen=True)
class FrequencyScaling:
  """The base class; a subclass overrides `frequencies`.

  Attributes:
    factor: the quotient of the new and the trained length, at least 1.

  Raises:
    ValueError: if `factor` is less than 1.
  """

  factor: float

  def __post_init__(self):
    check_numbers(factor=self.factor)
    if self.factor < 1:
      raise ValueError(f"factor must be at least 1, got {self.factor}")

  @property
  def magnitude(self) -> float:
    """The number by which rotated tokens are multiplied."""
    return 1.0

  def frequencies(self, base: float, size: int) -> np.ndarray:
    """The scaled frequencies, [size / 2], of `size` rotated features."""
    raise NotImplementedError(f"{type(self).__name__} must define frequencies")


def unscaled_frequencies(base: float, size: int) -> np.ndarray:
  """The angle per position of each pair, base ** (-2m / size), [size / 2]."""
  return base ** -(np.arange(0, size, 2) / max(size, 1))


@dataclasses.dataclass(frozen=True)
class LinearScaling(FrequencyScaling):
  """All frequencies divided by `factor`: positions are interpolated.

  See "Extending Context Window of Large Language Models via Positional
  Interpolation", Chen et al., 2023 (https://arxiv.org/abs/2306.15595).

  Example:
    >>> LinearScaling(4.0).frequencies(10000.0, 4)
    array([0.25  , 0.0025])
  """

  def frequencies(self, base: float, size: int) -> np.ndarray:
    """See `FrequencyScaling.frequencies`."""
    return unscaled_frequencies(base, size) / self.factor


@dataclasses.dataclass(frozen=True)
class NTKScaling(FrequencyScaling):
  """A larger base; only the smallest frequency is divided by `factor`.

  The base is multiplied by factor ** (d / (d - 2)) for d rotated features. It
  is the NTK-aware interpolation of "YaRN", Peng et al., 2023, section 3.1
  (https://arxiv.org/abs/2309.00071).

  Example:
    >>> NTKScaling(4.0).frequencies(10000.0, 4)
    array([1.    , 0.0025])
  """

  def frequencies(self, base: float, size: int) -> np.ndarray:
    """See `FrequencyScaling.frequencies`."""
    exponent = size / (size - 2) if size > 2 else 0.0
    return unscaled_frequencies(base * self.factor**exponent, size)


@dataclasses.dataclass(frozen=True)
class YaRNScaling(FrequencyScaling):
  """YaRN: small frequencies are divided by `factor`, large ones are kept.

  In between, the share of the divided frequency grows linearly with the index
  of the pair, as in the authors' code. Rotated tokens are multiplied by
  0.1 ln(factor) + 1. See "YaRN", Peng et al., 2023, sections 3.2 and 3.4
  (https://arxiv.org/abs/2309.00071).

  Attributes:
    original_length: the trained length.
    beta_fast: pairs with more periods than this within the trained length keep
      their frequency.
    beta_slow: pairs with fewer periods have it divided by `factor`.
    truncate: whether the two limits are rounded to whole indices, the first
      down and the second up. The authors' code rounds, gpt-oss does not.
    attention_factor: replaces 0.1 ln(factor) + 1; None keeps it.

  Raises:
    ValueError: if a length or a number of periods is not above 0.

  Example:
    >>> YaRNScaling(4.0, original_length=64).frequencies(10000.0, 4)
    array([1.    , 0.0025])
  """

  original_length: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  truncate: bool = True
  attention_factor: float | None = None

  def __post_init__(self):
    super().__post_init__()
    check_above_zero(
      original_length=self.original_length,
      beta_fast=self.beta_fast,
      beta_slow=self.beta_slow,
    )

  @property
  def magnitude(self) -> float:
    """The number by which rotated tokens are multiplied."""
    if self.attention_factor is not None:
      return self.attention_factor
    return 0.1 * math.log(self.factor) + 1.0

  def frequencies(self, base: float, size: int) -> np.ndarray:
    """See `FrequencyScaling.frequencies`."""

    def index(periods):
      """The index of the pair with so many periods in the trained length."""
      wavelength = self.original_length / periods
      return size * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))

    low, high = index(self.beta_fast), index(self.beta_slow)
    if self.truncate:
      low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = max(high - low, 0.001)  # no division by zero
    divided = np.clip((np.arange(size // 2) - low) / width, 0.0, 1.0)
    kept = unscaled_frequencies(base, size)
    return divided * kept / self.factor + (1.0 - divided) * kept


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(FrequencyScaling):
  """Llama 3.1: long wavelengths are multiplied by `factor`, short ones kept.

  In between, the frequency is interpolated linearly in the number of periods
  within the trained length. The formula is that of `apply_scaling` in
  https://github.com/meta-llama/llama-models (models/llama3/model.py).

  Attributes:
    original_length: the trained length.
    low_freq_factor: pairs with fewer periods than this within the trained
      length have their frequency divided by `factor`.
    high_freq_factor: pairs with more periods keep it.

  Raises:
    ValueError: if the factors are not in ascending order, or a number is not
      above 0.

  Example:
    >>> Llama3Scaling(8.0, original_length=64).frequencies(10000.0, 4)
    array([1.     , 0.00125])
  """

  original_length: int = 8192
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0

  def __post_init__(self):
    super().__post_init__()
    check_above_zero(original_length=self.original_length)
    if not self.low_freq_factor < self.high_freq_factor:
      raise ValueError(
        f"low_freq_factor={self.low_freq_factor} must be less than "
        f"high_freq_factor={self.high_freq_factor}"
      )

  def frequencies(self, base: float, size: int) -> np.ndarray:
    """See `FrequencyScaling.frequencies`."""
    original = unscaled_frequencies(base, size)
    periods = self.original_length * original / (2 * np.pi)
    width = self.high_freq_factor - self.low_freq_factor
    kept = np.clip((periods - self.low_freq_factor) / width, 0.0, 1.0)
    return (1.0 - kept) * original / self.factor + kept * original
