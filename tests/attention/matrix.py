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
_IMPLEMENTATIONS = dict(
  zip(("reference", "one_tile", "tiles"), IMPLEMENTATIONS)
)
# The kernels for TPUs, interpreted.
_IMPLEMENTATIONS["kernels"] = Pallas(interpret=True)


def sampled(
  argument: str | tuple[str, ...], values: Iterable, default: Iterable
):
  """Parametrizes a test; values outside `default` are exhaustive."""
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
  )


def sampled_product(
  names: Iterable[str], values: Iterable[Iterable], default: Iterable[tuple]
):
  """Like `sampled`, for the product of several arguments' values."""
  default = list(default)
  return pytest.mark.parametrize(
    tuple(names),
    [
      pytest.param(*case, marks=() if case in default else _exhaustive)
      for case in itertools.product(*values)
    ],
  )


def scores_and_implementations(
  default: Iterable[tuple[str, str]] = PAIRS,
  implementations: Iterable[str] = tuple(_IMPLEMENTATIONS),
):
  """All pairs of a score `name` and an `implementation`, most exhaustive."""
  default = list(default)
  return pytest.mark.parametrize(
    ("name", "implementation"),
    [
      pytest.param(
        name,
        _IMPLEMENTATIONS[choice],
        id=f"{name}-{choice}",
        marks=() if (name, choice) in default else _exhaustive,
      )
      for name in CASES
      for choice in implementations
    ],
  )


_exhaustive = pytest.mark.exhaustive
every_implementation = pytest.mark.parametrize(
  "implementation",
  [
    pytest.param(each, id=name, marks=_exhaustive if name == "kernels" else ())
    for name, each in _IMPLEMENTATIONS.items()
  ],
)
