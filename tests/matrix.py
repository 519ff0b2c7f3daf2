"""Which cases of a matrix run by default, and which with `-m exhaustive`.

Most of a test's time is compilation. By default a test has one score of each
kind, and only the test of values has all scores with both implementations.
"""

import itertools
from collections.abc import Iterable

import pytest

from attention.implementations import Pallas
from tests.attention.oracle import CASES, IMPLEMENTATIONS

# One score of each kind: a matrix product, channels in a loop, a function, a
# user's class.
KINDS = ("general", "additive", "closure", "own")
# Each kind of score with several tiles, and each implementation at least once.
PAIRS = (
  ("cosine", "reference"),
  ("scaled_dot", "one_tile"),
  ("general", "tiles"),
  ("additive", "tiles"),
  ("closure", "tiles"),
)
NAMED_IMPLEMENTATIONS = dict(
  zip(("reference", "one_tile", "tiles"), IMPLEMENTATIONS)
)
# The kernels for TPUs, interpreted.
NAMED_IMPLEMENTATIONS["kernels"] = Pallas(interpret=True)


def sampled(
  argument: str | tuple[str, ...],
  values: Iterable,
  default: Iterable,
  **options,
):
  """Parametrizes a test; values outside `default` are exhaustive.

  `options` are those of `pytest.mark.parametrize`.
  """
  default = list(default)
  return pytest.mark.parametrize(
    argument,
    [
      pytest.param(
        *((value,) if isinstance(argument, str) else value),
        marks=() if value in default else _exhaustive,
      )
      for value in values
    ],
    **options,
  )


def sampled_product(
  names: Iterable[str], values: Iterable[Iterable], default: Iterable[tuple]
):
  """Like `sampled`, for the product of several arguments' values."""
  return sampled(tuple(names), itertools.product(*values), default)


def scores_and_implementations(
  default: Iterable[tuple[str, str]] = PAIRS,
  implementations: Iterable[str] = tuple(NAMED_IMPLEMENTATIONS),
):
  """All pairs of a score `name` and an `implementation`, most exhaustive."""
  default = list(default)
  return pytest.mark.parametrize(
    ("name", "implementation"),
    [
      pytest.param(
        name,
        NAMED_IMPLEMENTATIONS[choice],
        id=f"{name}-{choice}",
        marks=() if (name, choice) in default else _exhaustive,
      )
      for name in CASES
      for choice in implementations
    ],
  )


def each_implementation(
  default: Iterable[str] = ("reference", "one_tile", "tiles"),
):
  """Every `implementation`; those outside `default` are exhaustive."""
  default = list(default)
  return pytest.mark.parametrize(
    "implementation",
    [
      pytest.param(each, id=name, marks=() if name in default else _exhaustive)
      for name, each in NAMED_IMPLEMENTATIONS.items()
    ],
  )


_exhaustive = pytest.mark.exhaustive
