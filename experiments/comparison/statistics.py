"""Confidence intervals of means over seeds, and tests of their differences."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
  """A mean and its 95% confidence interval.

  Attributes:
    mean: of the values.
    half_width: of the interval mean - half_width to mean + half_width; NaN for
      fewer than two values, or if one is not finite.
  """

  mean: float
  half_width: float


class Difference(NamedTuple):
  """Two groups whose means differ significantly.

  Attributes:
    higher: the group with the greater mean.
    lower: the other one.
    amount: the difference of the means.
    p: the p-value, adjusted for the number of pairs tested.
  """

  higher: str
  lower: str
  amount: float
  p: float


def interval(values: Sequence[float]) -> Interval:
  """Returns the mean and its 95% confidence interval, by Student's t.

  See "The Probable Error of a Mean", Student, 1908
  (https://doi.org/10.1093/biomet/6.1.1).

  Args:
    values: independent values of one group.

  Returns:
    The interval.

  Example:
    >>> found = interval([1.0, 2.0, 3.0])
    >>> round(found.mean, 2), round(found.half_width, 2)
    (2.0, 2.48)
  """
  mean, count = statistics.fmean(values), len(values)
  if not is_testable(values):
    return Interval(mean, math.nan)
  from scipy import stats

  error = statistics.stdev(values) / math.sqrt(count)
  return Interval(mean, float(stats.t.ppf(0.975, count - 1)) * error)


def is_testable(values: Sequence[float]) -> bool:
  """Whether there are two values at least, all of them finite."""
  return len(values) > 1 and all(map(math.isfinite, values))


def differences(
  groups: Mapping[str, Sequence[float]], level: float = 0.05
) -> list[Difference]:
  """Returns the pairs of groups whose means differ significantly.

  Uses Welch's t-test, which allows unequal variances, and the exact permutation
  test for two groups without variance; with Holm's correction for the number of
  pairs: see "A Simple Sequentially Rejective Multiple Test Procedure", Holm,
  1979 (https://www.jstor.org/stable/4615733).

  Args:
    groups: values by name; groups with fewer than two values, or with one that
      is not finite, are not tested.
    level: of significance, for all pairs together.

  Returns:
    The pairs, smallest p-value first.

  Example:
    >>> found = differences({"a": [1, 1.1, 0.9], "b": [5, 5.1, 4.9]})
    >>> [(each.higher, each.lower, round(each.amount, 1)) for each in found]
    [('b', 'a', 4.0)]
  """
  names = [name for name, values in groups.items() if is_testable(values)]
  tested = sorted(
    (_p_value(groups[one], groups[other]), one, other)
    for one, other in itertools.combinations(names, 2)
  )
  found, adjusted = [], 0.0
  for index, (p, one, other) in enumerate(tested):
    adjusted = max(adjusted, min(1.0, p * (len(tested) - index)))
    if adjusted >= level:
      break
    amount = statistics.fmean(groups[one]) - statistics.fmean(groups[other])
    higher, lower = (one, other) if amount > 0 else (other, one)
    found.append(Difference(higher, lower, abs(amount), adjusted))
  return found


def _p_value(one: Sequence[float], other: Sequence[float]) -> float:
  """Of Welch's test; of the permutation test if neither group has variance."""
  if len({*one}) == len({*other}) == 1:
    if one[0] == other[0]:
      return 1.0
    return 2 / math.comb(len(one) + len(other), len(one))
  from scipy import stats

  moments = [
    (statistics.fmean(each), statistics.stdev(each), len(each))
    for each in (one, other)
  ]
  # From moments: ttest_ind warns of a group without variance.
  test = stats.ttest_ind_from_stats(*moments[0], *moments[1], equal_var=False)
  return float(test.pvalue)
