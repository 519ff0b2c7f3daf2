"""Training the cells of a comparison, some at a time, each in its process."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from tqdm import tqdm

from experiments.comparison.grid import Cell
from experiments.errors import AGAIN, UserError
from experiments.progress import has_terminal
from experiments.training.metrics_writer import METRICS

# Seconds between two looks at the processes, and between two lines in a log.
_LOOK_EVERY, _LINE_EVERY = 0.2, 30.0
LOG = "train.log"


class Outcome(NamedTuple):
  """What came of a cell.

  Attributes:
    cell: which.
    error: why it failed; None if it is complete.
  """

  cell: Cell
  error: str | None


class _Attempt(NamedTuple):
  """A process that trains a cell, whose log begins there, in bytes."""

  cell: Cell
  log_start: int


class StoppedError(UserError):
  """The comparison was asked to stop; the same command goes on."""

  code = AGAIN


def run(cells: Sequence[Cell], num_jobs: int) -> list[Outcome]:
  """Trains what is not complete yet.

  A cell that fails does not stop the others. SIGINT, SIGTERM and SIGHUP have
  the cells under way save and stop; a second SIGINT stops them at once.

  Args:
    cells: of `grid`.
    num_jobs: how many at a time.

  Returns:
    What came of each, in their order.

  Raises:
    StoppedError: if it was asked to stop.

  Example:
    >>> run([], num_jobs=1)
    []
  """
  found = {cell.workdir: _found(cell) for cell in cells}
  outcomes = {place: outcome for place, outcome in found.items() if outcome}
  waiting = [cell for cell in cells if cell.workdir not in outcomes]
  under_way: dict[subprocess.Popen, _Attempt] = {}
  told = 0
  with (
    _listening() as asked,
    _Overview(waiting, len(cells)) as overview,
    _none_left_behind(under_way),
  ):
    while under_way or (waiting and not asked):
      while waiting and len(under_way) < num_jobs and not asked:
        cell = waiting.pop(0)
        try:
          process, attempt = _start(cell)
        except OSError as error:
          why = f"{error.filename or cell.workdir}: {error.strerror}"
          outcomes[cell.workdir] = Outcome(cell, why)
          overview.finish(outcomes[cell.workdir])
          continue
        under_way[process] = attempt
      time.sleep(_LOOK_EVERY)
      for number in asked[told:]:
        overview.say(f"{signal.Signals(number).name}: stopping what is trained")
        for process in under_way:
          # Training does not listen to SIGHUP.
          hung_up = number == signal.SIGHUP
          process.send_signal(signal.SIGTERM if hung_up else number)
      told = len(asked)
      for process in [each for each in under_way if each.poll() is not None]:
        attempt = under_way.pop(process)
        outcome = _outcome(attempt, process.returncode)
        outcomes[attempt.cell.workdir] = outcome
        overview.finish(outcome)
      overview.look(attempt.cell for attempt in under_way.values())
  if asked:
    raise StoppedError("stopped; the same command goes on")
  return [outcomes[cell.workdir] for cell in cells]


def _found(cell: Cell) -> Outcome | None:
  """What stands there already: None if there is work to do."""
  try:
    return Outcome(cell, None) if cell.is_complete() else None
  except (UserError, OSError, ValueError) as error:
    return Outcome(cell, str(error))


def _start(cell: Cell) -> tuple[subprocess.Popen, _Attempt]:
  """Starts a cell, in a session of its own: Ctrl-C is told it, not heard."""
  cell.workdir.mkdir(parents=True, exist_ok=True)
  with (cell.workdir / LOG).open("a", encoding="utf-8") as log:
    begins = log.seek(0, io.SEEK_END)
    process = subprocess.Popen(
      cell.command,
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  return process, _Attempt(cell, begins)


@contextlib.contextmanager
def _none_left_behind(under_way: Mapping[subprocess.Popen, _Attempt]):
  """Has what is trained save and stop, should this process fail."""
  try:
    yield
  finally:
    for process in under_way:
      process.terminate()


def _outcome(attempt: _Attempt, code: int) -> Outcome:
  """What a process that has ended leaves."""
  cell = attempt.cell
  if code == 0:
    return Outcome(cell, None)
  log = cell.workdir / LOG
  said = log.read_bytes()[attempt.log_start :]
  lines = said.decode(encoding="utf-8", errors="replace").splitlines()
  told = [line for line in lines if line.strip()]
  error = next((line for line in told[::-1] if "error:" in line.lower()), "")
  why = error or (told[-1] if told else "it said nothing")
  return Outcome(cell, f"exit code {code}: {why.strip()} ({log})")


@contextlib.contextmanager
def _listening() -> Iterator[list[int]]:
  """The signals that asked to stop, so far."""
  asked: list[int] = []
  before = {
    number: signal.signal(number, lambda number, _: asked.append(number))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  }
  try:
    yield asked
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


class _Overview:
  """A bar of all steps of all cells, or a line now and then."""

  def __init__(self, waiting: Sequence[Cell], num_cells: int):
    self._steps = {cell.workdir: cell.raw["train"]["steps"] for cell in waiting}
    self._done = {cell.workdir: last_step(cell) for cell in waiting}
    self._finished = num_cells - len(waiting)
    self._num_cells = num_cells
    self._lines = not has_terminal()
    self._begin = self._said = self._looked = time.monotonic()
    self._before = sum(self._done.values())
    self._bar = tqdm(
      total=sum(self._steps.values()),
      initial=self._before,
      disable=self._lines or not waiting,
      unit="step",
      dynamic_ncols=True,
    )
    self._describe()

  def __enter__(self) -> "_Overview":
    return self

  def __exit__(self, *_) -> None:
    self._bar.close()

  def say(self, line: str) -> None:
    """Prints a line above the bar."""
    if self._lines:
      print(line, file=sys.stderr, flush=True)
    else:
      self._bar.write(line, file=sys.stderr)

  def finish(self, outcome: Outcome) -> None:
    """Counts a cell."""
    cell = outcome.cell
    self._finished += 1
    # A failure or patience may have ended it before its last step.
    self._steps[cell.workdir] = self._done[cell.workdir] = last_step(cell)
    self._bar.total = sum(self._steps.values())
    name = f"{cell.group}, seed {cell.seed}"
    self.say(f"{name}: {outcome.error or 'done'}")
    self._describe()

  def look(self, under_way: Iterable[Cell]) -> None:
    """Looks how far they are."""
    now = time.monotonic()
    if now - self._looked < 1.0:
      return
    self._looked = now
    for cell in under_way:
      self._done[cell.workdir] = last_step(cell)
    done = sum(self._done.values())
    self._bar.update(done - self._bar.n)
    if self._lines and now - self._said >= _LINE_EVERY:
      self._said = now
      total, made = sum(self._steps.values()), done - self._before
      seconds = (now - self._begin) * (total - done) / made if made > 0 else 0
      left = f", {tqdm.format_interval(seconds)} left" if made > 0 else ""
      self.say(
        f"{self._finished}/{self._num_cells} cells, {done:,} of {total:,}"
        f" steps{left}"
      )

  def _describe(self) -> None:
    self._bar.set_description(f"{self._finished}/{self._num_cells} cells")


def last_step(cell: Cell) -> int:
  """Returns how far a cell has come, as far as it has said.

  Args:
    cell: begun or not.

  Returns:
    A number of steps.

  Example:
    >>> last_step(cell)  # doctest: +SKIP
    1200
  """
  path = cell.workdir / METRICS
  try:
    with path.open("rb") as file:
      file.seek(max(path.stat().st_size - 4096, 0))
      lines = file.read().splitlines()
    return int(json.loads(lines[-1])["step"])
  except (OSError, IndexError, ValueError, KeyError):
    return 0
