"""The sections that time one task against another, but for the scaled dot."""

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
  job,
  that_fit,
)


def causal_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A causal mask against none."""
  shape = grid.causal

  def make(direction):
    return [
      peers.ours("blockwise", shape, direction, name="full"),
      peers.ours(
        "blockwise", shape, direction, mask=masks.causal(), name="causal"
      ),
    ]

  return _by_direction(cases.title(shape), shape, rounds, make)


def _by_direction(case, shape, rounds, make) -> list[Job]:
  return [
    job(case, shape, direction, rounds, functools.partial(make, direction))
    for direction in DIRECTIONS
  ]


def _against(section, rows, name, other, goals, at_least=False):
  """A target a direction: the time of `name` over that of `other`."""
  found = []
  for row in rows:
    ratio = row.ratio(name, other)
    if ratio is not None:
      goal = goals[DIRECTIONS.index(row.direction)]
      what = f"{row.case} {row.direction}: {name} / {other}"
      found.append(Target(section, what, ratio, goal, at_least))
  return found


def causal_targets(rows: Sequence[Row]) -> list[Target]:
  """Half of the tiles are empty."""
  return _against("causal", rows, "causal", "full", (0.6, 0.6))


def window_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A sliding window of a fixed size in longer and longer sequences."""
  window = (grid.window_size, 0)

  def make(shape, direction):
    mask = masks.sliding_window(*window)
    dense = [
      peers.ours("chosen", shape, direction, mask=mask),
      peers.jax_nn(shape, direction, window=window),
    ]
    own = peers.ours("blockwise", shape, direction, mask=mask)
    return [own, *that_fit(dense, DENSE_LIMIT // 2)]

  jobs = []
  for length in grid.window:
    shape = (1, 1, length)
    made = functools.partial(make, shape)
    jobs += _by_direction(
      f"window of {window[0]}, T={length}", shape, rounds, made
    )
  return jobs


def window_targets(rows: Sequence[Row]) -> list[Target]:
  """The exponent of growth: 1 is linear."""
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
  """The additive score against its formula written plainly."""
  shape = grid.additive

  def make(direction):
    own = [
      peers.ours(who, shape, direction, score="additive")
      for who in ("blockwise", "chosen", "reference")
    ]
    return own + peers.additive_peers(shape, direction)

  return _by_direction(cases.title(shape), shape, rounds, make)


def additive_targets(rows: Sequence[Row]) -> list[Target]:
  """How many times faster."""
  return [
    *_against("additive", rows, "plain torch", "blockwise", (15, 10), True),
    *_against("additive", rows, "plain jax", "blockwise", (7, 7), True),
  ]


def projected_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """Scores that are a dot product once the tokens are mapped."""
  shape = grid.projected

  def make(direction):
    return [
      peers.ours("blockwise", shape, direction, score=score, name=score)
      for score in ("dot", "general", "cosine")
    ]

  return _by_direction(cases.title(shape), shape, rounds, make)


def projected_targets(rows: Sequence[Row]) -> list[Target]:
  """Maps cost next to nothing."""
  return [
    target
    for name in ("general", "cosine")
    for target in _against("projected", rows, name, "dot", (1.1, 1.1))
  ]


def closure_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A user's function with a captured temperature."""
  shape = grid.closure

  def make(direction):
    return [
      peers.ours(who, shape, direction, score="closure")
      for who in ("blockwise", "chosen", "reference")
    ]

  return _by_direction(cases.title(shape), shape, rounds, make)


def closure_targets(rows: Sequence[Row]) -> list[Target]:
  """Memory is not paid for with time."""
  return _against("closure", rows, "blockwise", "reference", (1.0, 1.0))
