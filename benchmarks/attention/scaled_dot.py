"""Compares scaled dot-product attention with other implementations."""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Sequence

import jax.numpy as jnp

from attention import masks
from benchmarks.attention import cases, peers
from benchmarks.attention.measure import (
  DIRECTIONS,
  Contender,
  Entry,
  Job,
  Row,
  Target,
  compiled,
  job,
)


def _contenders(shape, direction, causal, first) -> list[Contender]:
  rest = [name for name in peers.OURS if name != first]
  mask = masks.causal() if causal else None
  return [
    *(peers.ours(name, shape, direction, mask=mask) for name in (first, *rest)),
    *peers.scaled_dot_peers(shape, direction, causal),
  ]


def _jobs(shapes, rounds, first) -> list[Job]:
  """A row for each shape, mask and direction; `first` is the baseline."""
  jobs = []
  for shape in shapes:
    for causal in (False, True):
      case = f"{cases.title(shape)} {'causal' if causal else 'full'}"
      for direction in DIRECTIONS:
        make = functools.partial(_contenders, shape, direction, causal, first)
        flops = _flops(shape, direction, causal)
        jobs.append(job(case, shape, direction, rounds, make, flops))
  return jobs


def _flops(shape, direction, causal) -> float:
  """Two products of 2 T S D forward, five more backward; half if causal."""
  each = 4 if direction == "forward" else 14
  flops = each * math.prod(shape) * shape[-1] * cases.SIZE
  return flops / 2 if causal else flops


def dot_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A matrix product, to compare rates with, and then all shapes."""
  side = grid.matmul

  def product():
    square = [cases.draw((side, side), seed) for seed in range(2)]
    return [compiled("matmul", jnp.matmul, square, "forward")]

  case = f"matmul {cases.title((side,) * 3)}"
  plain = job(case, (side,), "forward", rounds, product, 2 * side**3)
  return [plain, *_jobs(grid.dot, rounds, "blockwise")]


def with_rates(rows: Sequence[Row]) -> list[Row]:
  """Adds GFLOP/s, and their share of the matmul in the first row."""
  peak = _rate(rows[0], rows[0].entries[0])
  return [
    dataclasses.replace(
      row, entries=[_rated(row, entry, peak) for entry in row.entries]
    )
    for row in rows
  ]


def _rate(row: Row, entry: Entry) -> float:
  return (row.flops or 0.0) / (entry.seconds or math.inf) / 1e9


def _rated(row: Row, entry: Entry, peak: float) -> Entry:
  rate = _rate(row, entry)
  notes = {"gflops": rate, "share_of_matmul": rate / peak}
  return dataclasses.replace(entry, notes=entry.notes | notes)


def odd_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """Lengths and sizes that are no multiples of tiles and vector registers."""
  jobs = []
  for *shape, size in grid.odd:
    for causal in (False, True):
      kind = "causal" if causal else "full"
      case = f"{cases.title(shape)}, D={size} {kind}"
      for direction in DIRECTIONS:
        make = functools.partial(
          _odd_contenders, shape, size, causal, direction
        )
        jobs.append(job(case, shape, direction, rounds, make))
  return jobs


def _odd_contenders(shape, size, causal, direction) -> list[Contender]:
  mask = masks.causal() if causal else None
  return [
    peers.ours("blockwise", shape, direction, mask=mask, size=size),
    *peers.scaled_dot_peers(
      shape, direction, causal, size=size, with_attnax=False
    ),
  ]


def odd_targets(rows: Sequence[Row]) -> list[Target]:
  """Geometric means over all shapes, for each direction."""
  return [
    target
    for direction, goal in zip(DIRECTIONS, (1.10, 1.05))
    for target in _mean(
      [row for row in rows if row.direction == direction],
      direction,
      "blockwise",
      "torch",
      goal,
      False,
      section="odd",
    )
  ]


def dot_targets(rows: Sequence[Row]) -> list[Target]:
  """Geometric means over all shapes, for each direction."""
  found = []
  for direction, goal in zip(DIRECTIONS, (1.05, 1.0)):
    those = [row for row in rows if row.direction == direction]
    found += _mean(those, direction, "blockwise", "torch", goal, False)
    found += _mean(those, direction, "jax.nn", "blockwise", 3.5, True)
  return [*found, *_dispatch("dot", rows)]


def _mean(
  rows, direction, name, other, goal, at_least, section="dot"
) -> list[Target]:
  ratios = _ratios(rows, name, other)
  if not ratios:
    return []
  what = f"{direction}: {name} / {other}, geometric mean"
  mean = statistics.geometric_mean(ratios)
  return [Target(section, what, mean, goal, at_least)]


def _ratios(rows: Iterable[Row], *names: str) -> list[float]:
  ratios = (row.ratio(*names) for row in rows)
  return [ratio for ratio in ratios if ratio is not None]


def _dispatch(section: str, rows: Sequence[Row]) -> list[Target]:
  """The time that dispatch loses to the better implementation."""
  ratios = _ratios(rows, "dispatched", "blockwise", "reference")
  name = "dispatched / better of blockwise and reference, worst"
  return [Target(section, name, max(ratios), 1.1)] if ratios else []


def small_jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """Short sequences."""
  return _jobs(grid.small, rounds, "dispatched")


def small_targets(rows: Sequence[Row]) -> list[Target]:
  """Compared with the better peer of each row."""
  rivals = ["jax.nn", "torch"] if peers.has_torch() else ["jax.nn"]
  name = (
    f"dispatched / {'better of ' * (len(rivals) > 1)}{' and '.join(rivals)}"
  )
  found = [
    Target("small", f"{row.case} {row.direction}: {name}", ratio, 1.2)
    for row in rows
    if (ratio := row.ratio("dispatched", *rivals)) is not None
  ]
  return [*found, *_dispatch("small", rows)]
