"""Time and memory of every score and peer by sequence length."""

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

# Scores for which the dense formula is measured too.
_DENSE = ("scaled_dot", "additive")
# attnax unrolls its loops: longer sequences compile for minutes.
_MAX_ATTNAX_LENGTH = 4096


def jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A row for each length; at most 3 rounds, as the longest take seconds."""
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
    peers.ours(
      implementation,
      shape,
      direction,
      score=score,
      name=f"{score} ({implementation})",
    )
    for implementation, names in (("blockwise", scores), ("reference", dense))
    for score in names
  ]
  theirs = peers.scaled_dot_peers(
    shape, direction, causal=False, with_attnax=length <= _MAX_ATTNAX_LENGTH
  )
  entries = timed(that_fit([*ours, *theirs]), rounds)
  return Row(f"{cases.title(shape)}", direction, length, entries)


def targets(rows: Sequence[Row]) -> list[Target]:
  """None: this section is for the figures."""
  del rows
  return []
