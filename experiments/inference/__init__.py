"""Trained runs, restored: evaluated, translated with, and analysed."""

from experiments.inference.restored import (
  Restored,
  evaluate,
  evaluation_set,
  restore,
)
from experiments.inference.translator import Line, make_translator

__all__ = [
  "Line",
  "Restored",
  "evaluate",
  "evaluation_set",
  "make_translator",
  "restore",
]
