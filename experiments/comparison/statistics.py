"""How sure a mean over seeds is, and which means differ."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Interval(NamedTuple):
  """A mean with its 95% confidence interval.

  Attributes:
    mean: of the values.
    half_width: the interval reaches so far to both sides; NaN for one value,
      or if one is not finite.
  """

  mean: float
  half_width: float


class Difference(NamedTuple):
  """Two groups whose means differ.

  Attributes:
    better: the group with the greater mean.
    worse: the other one.
    amount: by how much.
    p: how probable so great a difference is by chance, adjusted for the number
      of pairs that were compared.
  """

  better: str
  worse: str
  amount: float
  p: float


def interval(values: Sequence[float]) -> Interval:
  """Returns the mean of a few values and its 95% confidence interval.

  Of Student's t distribution: see "The Probable Error of a Mean", Student,
  1908 (https://doi.org/10.1093/biomet/6.1.1).

  Args:
    values: of one group, independent of each other.

  Returns:
    The interval.

  Example:
    >>> found = interval([1.0, 2.0, 3.0])
    >>> round(found.mean, 2), round(found.half_width, 2)
    (2.0, 2.48)
  """
  mean, count = statistics.fmean(values), len(values)
  if not is_comparable(values):
    return Interval(mean, math.nan)
  from scipy import stats

  error = statistics.stdev(values) / math.sqrt(count)
  return Interval(mean, float(stats.t.ppf(0.975, count - 1)) * error)


def is_comparable(values: Sequence[float]) -> bool:
  """Returns whether values tell how far they are spread.

  Args:
    values: of one group.

  Returns:
    Whether there are two at least, all of them finite.

  Example:
    >>> is_comparable([1.0, 2.0]), is_comparable([1.0, math.nan])
    (True, False)
  """
  return len(values) > 1 and all(map(math.isfinite, values))


def differences(
  groups: Mapping[str, Sequence[float]], level: float = 0.05
) -> list[Difference]:
  """Returns the pairs of groups whose means differ significantly.

  Welch's test for each pair, which does not take their spreads to be equal, or
  where there is no spread the exact test of all ways to deal out the values;
  and Holm's adjustment for their number: see "A Simple Sequentially Rejective
  Multiple Test Procedure", Holm, 1979 (https://www.jstor.org/stable/4615733).

  Args:
    groups: values by name; those that are not comparable are left out.
    level: of significance, for all pairs together.

  Returns:
    The pairs, surest first.

  Example:
    >>> found = differences({"a": [1, 1.1, 0.9], "b": [5, 5.1, 4.9]})
    >>> [(each.better, each.worse, round(each.amount, 1)) for each in found]
    [('b', 'a', 4.0)]
  """
  names = [name for name, values in groups.items() if is_comparable(values)]
  tested = sorted(
    (_probability(groups[one], groups[other]), one, other)
    for one, other in itertools.combinations(names, 2)
  )
  found, least = [], 0.0
  for index, (p, one, other) in enumerate(tested):
    least = max(least, min(1.0, p * (len(tested) - index)))
    if least >= level:
      break
    amount = statistics.fmean(groups[one]) - statistics.fmean(groups[other])
    better, worse = (one, other) if amount > 0 else (other, one)
    found.append(Difference(better, worse, abs(amount), least))
  return found


def _probability(one: Sequence[float], other: Sequence[float]) -> float:
  """Of Welch's test; of permutations where neither group has any spread."""
  if len({*one}) == len({*other}) == 1:
    if one[0] == other[0]:
      return 1.0
    return 2 / math.comb(len(one) + len(other), len(one))
  from scipy import stats

  means, spreads, counts = (
    [of(values) for values in (one, other)]
    for of in (statistics.fmean, statistics.stdev, len)
  )
  summaries = [each for pair in zip(means, spreads, counts) for each in pair]
  found = stats.ttest_ind_from_stats(*summaries, equal_var=False)
  return float(found.pvalue)
