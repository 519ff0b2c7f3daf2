"""Every score and every peer from short sequences to long ones."""

import functools
from collections.abc import Sequence

from benchmarks.attention import cases, peers
from benchmarks.attention.measure import (
  DIRECTIONS,
  Job,
  Row,
  Target,
  that_fit,
  timed,
)

# Scores that are measured with the dense formula too.
_DENSE = ("scaled_dot", "additive")
# Beyond, attnax, which unrolls its loops, compiles for minutes.
_ATTNAX = 4096


def jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A row a length; a few rounds, the longest take seconds a call."""
  scores = grid.scores or tuple(cases.SCORES)
  row = functools.partial(_row, rounds=min(rounds, 3), scores=scores)
  return [
    Job(f"curves T={length}", functools.partial(row, length))
    for length in grid.curves
  ]


def _row(length: int, rounds: int, scores: Sequence[str]) -> Row:
  shape, direction = (1, 1, length), DIRECTIONS[1]
  dense = [score for score in scores if score in _DENSE]
  ours = [
    peers.ours(who, shape, direction, score=score, name=f"{score} ({who})")
    for who, names in (("blockwise", scores), ("reference", dense))
    for score in names
  ]
  theirs = peers.scaled_dot_peers(
    shape, direction, causal=False, with_attnax=length <= _ATTNAX
  )
  entries = timed(that_fit([*ours, *theirs]), rounds)
  return Row(f"{cases.title(shape)}", direction, length, entries)


def targets(rows: Sequence[Row]) -> list[Target]:
  """None: these are for the pictures."""
  del rows
  return []
