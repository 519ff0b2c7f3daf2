"""Encodings of positions in tokens: sinusoidal and rotary."""

from attention.positions.encodings import RotaryOptions, rotary, sinusoidal
from attention.positions.frequency_scaling import (
  FrequencyScaling,
  LinearScaling,
  Llama3Scaling,
  NTKScaling,
  YaRNScaling,
)

__all__ = [
  "FrequencyScaling",
  "LinearScaling",
  "Llama3Scaling",
  "NTKScaling",
  "RotaryOptions",
  "YaRNScaling",
  "rotary",
  "sinusoidal",
]
