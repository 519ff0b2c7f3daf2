"""Memory of the gradient, for lengths whose dense weights would not fit.

Run as a program, this module prints the resident memory of one gradient:

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
from benchmarks.attention.measure import DIRECTIONS, Entry, Job, Row, Target

_GOAL = 64.0


def jobs(grid: cases.Grid, rounds: int) -> list[Job]:
  """A row for each score."""
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
  """One for each score."""
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
  """The peak resident memory of this process, before and after a call."""
  contender = _gradient(score, length)
  _reset_peak()
  before = _peak_mib()
  contender.run()
  return {"resident_mib_before": before, "resident_mib_after": _peak_mib()}


def _reset_peak() -> None:
  """Resets the peak on Linux, to exclude the compiler's memory."""
  with contextlib.suppress(OSError):
    pathlib.Path("/proc/self/clear_refs").write_text("5")


def _peak_mib() -> float:
  """The peak resident memory of this process.

  On Linux `ru_maxrss` would include the parent process's at the time of fork.
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
