"""The sections that compare the times of two tasks or implementations."""

import functools
from collections.abc import Sequence

import numpy as np

from attention import masks
from benchmarks.attention import cases, peers
from benchmarks.attention.measure import (
  DENSE_LIMIT,
  DIRECTIONS,
  Job,
  Row,
  Target,
  by_direction,
  that_fit,
)


def causal_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A causal mask, compared with no mask."""
  shape = grid.causal

  def make(direction):
    return [
      peers.ours("blockwise", shape, direction, name="full"),
      peers.ours(
        "blockwise", shape, direction, mask=masks.causal(), name="causal"
      ),
    ]

  return by_direction(cases.title(shape), shape, rounds, make)


def _against(section, rows, name, other, goals, at_least=False):
  """A target per direction: the time of `name` divided by that of `other`."""
  found = []
  for row in rows:
    ratio = row.ratio(name, other)
    if ratio is not None:
      goal = goals[DIRECTIONS.index(row.direction)]
      what = f"{row.case} {row.direction}: {name} / {other}"
      found.append(Target(section, what, ratio, goal, at_least))
  return found


def causal_targets(rows: Sequence[Row]) -> list[Target]:
  """A causal mask leaves half of the tiles empty."""
  return _against("causal", rows, "causal", "full", (0.6, 0.6))


def window_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A sliding window of a fixed size, by sequence length."""
  window = (grid.window_size, 0)

  def make(shape, direction):
    mask = masks.sliding_window(*window)
    dense = [
      peers.ours("dispatched", shape, direction, mask=mask),
      peers.jax_nn(shape, direction, window=window),
    ]
    own = peers.ours("blockwise", shape, direction, mask=mask)
    return [own, *that_fit(dense, DENSE_LIMIT // 2)]

  jobs = []
  for length in grid.window:
    shape = (1, 1, length)
    made = functools.partial(make, shape)
    jobs += by_direction(
      f"window of {window[0]}, T={length}", shape, rounds, made
    )
  return jobs


def window_targets(rows: Sequence[Row]) -> list[Target]:
  """The exponent with which the time grows in T: 1 is linear."""
  found = []
  for direction in DIRECTIONS:
    those = [row for row in rows if row.direction == direction]
    lengths = np.log([row.length for row in those])
    times = np.log([row.entries[0].seconds or np.nan for row in those])
    slope = float(np.polyfit(lengths, times, 1)[0])
    name = f"{direction}: exponent of the time's growth with T"
    found.append(Target("window", name, slope))
  return found


def additive_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """The additive score, compared with the plain formula."""
  shape = grid.additive

  def make(direction):
    own = [
      peers.ours(name, shape, direction, score="additive")
      for name in ("blockwise", "dispatched", "reference")
    ]
    return own + peers.additive_peers(shape, direction)

  return by_direction(cases.title(shape), shape, rounds, make)


def additive_targets(rows: Sequence[Row]) -> list[Target]:
  """The speed-up over the plain formula."""
  return [
    *_against("additive", rows, "plain torch", "blockwise", (15, 12), True),
    *_against("additive", rows, "plain jax", "blockwise", (7, 7), True),
  ]


def projected_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """Scores that are dot products of projected tokens."""
  shape = grid.projected

  def make(direction):
    return [
      peers.ours("blockwise", shape, direction, score=score, name=score)
      for score in ("dot", "general", "cosine")
    ]

  return by_direction(cases.title(shape), shape, rounds, make)


def projected_targets(rows: Sequence[Row]) -> list[Target]:
  """The projections should cost little."""
  return [
    target
    for name in ("general", "cosine")
    for target in _against("projected", rows, name, "dot", (1.1, 1.1))
  ]


def closure_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A user-defined score that closes over a temperature."""
  shape = grid.closure

  def make(direction):
    return [
      peers.ours(name, shape, direction, score="closure")
      for name in ("blockwise", "dispatched", "reference")
    ]

  return by_direction(cases.title(shape), shape, rounds, make)


def closure_targets(rows: Sequence[Row]) -> list[Target]:
  """Blockwise should not be slower than dense."""
  return _against("closure", rows, "blockwise", "reference", (1.1, 1.0))
