"""Confidence intervals and significant differences."""

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from experiments.comparison.statistics import differences, interval


def test_95_percent_of_intervals_contain_the_mean():
  rng = np.random.default_rng(0)
  contained = 0
  for _ in range(400):
    found = interval(list(rng.normal(3.0, 2.0, 5)))
    contained += abs(found.mean - 3.0) <= found.half_width
  assert 0.92 < contained / 400 < 0.98


def test_interval_equals_scipys():
  values = [4.2, 5.1, 3.9, 4.8]
  low, high = stats.t.interval(
    0.95, 3, loc=statistics.fmean(values), scale=stats.sem(values)
  )
  found = interval(values)
  assert found.mean - found.half_width == pytest.approx(low)
  assert found.mean + found.half_width == pytest.approx(high)
  assert math.isnan(interval([1.0]).half_width)
  assert math.isnan(interval([1.0, 2.0]).half_width)


def test_p_values_are_corrected_for_the_number_of_pairs():
  rng = np.random.default_rng(1)
  false = 0
  for _ in range(200):
    groups = {name: list(rng.normal(size=5)) for name in "abcdef"}
    false += bool(differences(groups))
  assert false / 200 < 0.1  # half, were the fifteen pairs not corrected for
  groups = {"a": [1.0, 1.1, 0.9], "b": [9.0, 9.1, 8.9], "c": [1.0, 1.2, 0.9]}
  found = differences(groups)
  assert {(each.higher, each.lower) for each in found} == {
    ("b", "a"),
    ("b", "c"),
  }


def test_groups_without_variance_are_compared_by_the_permutation_test():
  (found,) = differences({"a": [1.0] * 5, "b": [0.5] * 5})
  exact = stats.permutation_test(
    ([1.0] * 5, [0.5] * 5), lambda one, other: np.mean(one) - np.mean(other)
  )
  assert found.p == pytest.approx(exact.pvalue)
  assert not differences({"a": [1.0] * 2, "b": [0.5] * 2})
  assert not differences({"a": [1.0] * 5, "b": [1.0] * 5})


def test_one_of_two_groups_may_have_no_variance():
  groups = {"dot": [1.0, 1.0, 1.0], "none": [0.5, 0.6, 0.55]}
  (found,) = differences(groups)
  assert (found.higher, found.lower) == ("dot", "none")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_groups_with_values_that_are_not_finite_are_not_tested(bad):
  assert math.isnan(interval([bad, 1.0, 2.0]).half_width)
  groups = {"a": [bad, 1, 2], "b": [1.0, 1.1, 0.9], "c": [9.0, 9.1, 8.9]}
  found = differences(groups)
  assert [(each.higher, each.lower) for each in found] == [("c", "b")]
