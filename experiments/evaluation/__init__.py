"""Evaluation sets: predictions, metrics and reports."""

from experiments.evaluation.evaluator import (
  Evaluation,
  add_alignment_error,
  make_evaluator,
)
from experiments.evaluation.search import configured_search

__all__ = [
  "Evaluation",
  "add_alignment_error",
  "configured_search",
  "make_evaluator",
]
