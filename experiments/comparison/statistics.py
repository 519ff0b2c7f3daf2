"""Confidence intervals of means over seeds, and tests of their differences."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_LEVEL = 0.05  # of significance


class Interval(NamedTuple):
  """The mean of some values, and its 95% confidence interval."""

  mean: float
  half_width: float  # NaN for fewer than three values, or if one is not finite


class Difference(NamedTuple):
  """Two groups whose means differ significantly."""

  higher: str  # the group with the greater mean
  lower: str
  amount: float  # the difference of the means
  p: float  # adjusted for the number of pairs tested


def interval(values: Sequence[float]) -> Interval:
  """The mean of independent values, and its interval by Student's t."""
  mean, count = statistics.fmean(values), len(values)
  # That of two values is 6.4 times as wide as their range.
  if count < 3 or not is_testable(values):
    return Interval(mean, math.nan)
  from scipy import stats

  error = statistics.stdev(values) / math.sqrt(count)
  return Interval(mean, float(stats.t.ppf(0.975, count - 1)) * error)


def is_testable(values: Sequence[float]) -> bool:
  """Whether there are at least two values, all of them finite."""
  return len(values) > 1 and all(map(math.isfinite, values))


def differences(groups: Mapping[str, Sequence[float]]) -> list[Difference]:
  """The pairs of groups whose means differ, smallest p-value first."""
  names = [name for name, values in groups.items() if is_testable(values)]
  tested = sorted(
    (_p_value(groups[one], groups[other]), one, other)
    for one, other in itertools.combinations(names, 2)
  )
  # The correction of Holm, 1979 (https://www.jstor.org/stable/4615733).
  found, adjusted = [], 0.0
  for index, (p, one, other) in enumerate(tested):
    adjusted = max(adjusted, min(1.0, p * (len(tested) - index)))
    if adjusted >= _LEVEL:
      break
    amount = statistics.fmean(groups[one]) - statistics.fmean(groups[other])
    higher, lower = (one, other) if amount > 0 else (other, one)
    found.append(Difference(higher, lower, abs(amount), adjusted))
  return found


def _p_value(one: Sequence[float], other: Sequence[float]) -> float:
  """Welch's test; the exact permutation test if no group has any variance."""
  if len({*one}) == len({*other}) == 1:
    if one[0] == other[0]:
      return 1.0
    return 2 / math.comb(len(one) + len(other), len(one))
  from scipy import stats

  moments = [
    (statistics.fmean(each), statistics.stdev(each), len(each))
    for each in (one, other)
  ]
  # `ttest_ind` warns about a group without variance; this function does not.
  test = stats.ttest_ind_from_stats(*moments[0], *moments[1], equal_var=False)
  return float(test.pvalue)
