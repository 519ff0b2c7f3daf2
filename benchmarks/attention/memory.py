"""Temporaries of the gradient at a length where nothing dense fits.

In a process of its own this module reports a run's resident memory:

    python -m benchmarks.attention.memory additive 16384
"""

import contextlib
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from benchmarks.attention import cases, peers, settings
from benchmarks.attention.measure import (
  DIRECTIONS,
  Entry,
  Job,
  Row,
  Target,
)

_GOAL = 64.0


def jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A row a score."""
  del rounds  # nothing is timed
  return [
    Job(f"memory of {score}", functools.partial(_row, score, grid.memory))
    for score in grid.scores or cases.SCORES
  ]


def _row(score: str, length: int) -> Row:
  contender = _gradient(score, length)
  resident = json.loads(
    subprocess.run(
      [sys.executable, "-m", __name__, score, str(length)],
      check=True,
      stdout=subprocess.PIPE,
      env=settings.unchanged_environment(),
    ).stdout
  )
  entry = Entry("blockwise", (), contender.temporary_bytes, resident)
  return Row(f"{score}, T={length}", DIRECTIONS[1], length, [entry])


def _gradient(score: str, length: int):
  return peers.ours("blockwise", (1, 1, length), DIRECTIONS[1], score=score)


def targets(rows: Sequence[Row]) -> list[Target]:
  """One a score."""
  return [
    Target(
      "memory",
      f"{row.case}: MiB of temporaries",
      (row.entries[0].temporary_bytes or 0) / 2**20,
      _GOAL,
    )
    for row in rows
  ]


def resident(score: str, length: int) -> dict[str, float]:
  """The largest resident memory of this process, before and after a run."""
  contender = _gradient(score, length)
  _forget_peak()
  before = _peak_mib()
  contender.run()
  return {"resident_mib_before": before, "resident_mib_after": _peak_mib()}


def _forget_peak() -> None:
  """Starts the peak again, where Linux can: not to see the compiler's."""
  with contextlib.suppress(OSError):
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
  """The largest resident memory of this process so far.

  Not `ru_maxrss` on Linux: a process begins with that of who started it.
  """
  status = pathlib.Path("/proc/self/status")
  if status.exists():
    for line in status.read_text().splitlines():
      if line.startswith("VmHWM:"):
        return int(line.split()[1]) / 2**10
  import resource  # not on every system

  unit = 2**20 if sys.platform == "darwin" else 2**10
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


if __name__ == "__main__":
  print(json.dumps(resident(sys.argv[1], int(sys.argv[2]))))
