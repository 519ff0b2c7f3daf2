"""Compares trainings: a grid of trials, their results, statistics, a report."""

from experiments.comparison.grid import Trial, make_trials
from experiments.comparison.statistics import (
  Difference,
  Interval,
  differences,
  interval,
)

__all__ = [
  "Difference",
  "Interval",
  "Trial",
  "differences",
  "interval",
  "make_trials",
]
