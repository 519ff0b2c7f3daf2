"""Trains the trials of a comparison, each in a process of its own."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tqdm import tqdm

from experiments.comparison.grid import Trial
from experiments.errors import AGAIN, UserError
from experiments.progress import has_terminal
from experiments.training.metrics_writer import METRICS

LOG = "train.log"
_POLL_SECONDS = 0.2
# Seconds between two updates of the progress bar in a log file.
_LOG_SECONDS = 30.0


class Outcome(NamedTuple):
  """The result of training a trial."""

  trial: Trial
  error: str | None  # None if the trial is complete


class _Attempt(NamedTuple):
  """A process that trains a trial."""

  trial: Trial
  process: subprocess.Popen
  log_start: int  # byte of the log at which the output of this process begins


class StoppedError(UserError):
  """A signal stopped the comparison; the same command continues it."""

  code = AGAIN


def run(trials: Sequence[Trial], num_jobs: int) -> list[Outcome]:
  """Trains the incomplete trials, `num_jobs` at a time; returns all outcomes.

  A failed trial does not stop the others. On SIGINT, SIGTERM or SIGHUP the
  running trials save a checkpoint and stop, and StoppedError is raised; on a
  second SIGINT they stop without saving.
  """
  existing = {trial.workdir: _existing(trial) for trial in trials}
  outcomes = {workdir: each for workdir, each in existing.items() if each}
  waiting = [trial for trial in trials if trial.workdir not in outcomes]
  running: list[_Attempt] = []
  num_forwarded = 0
  with (
    _stop_signals() as received,
    contextlib.closing(_Progress(waiting, len(trials))) as progress,
    contextlib.ExitStack() as on_error,
  ):
    on_error.callback(_terminate, running)
    while running or (waiting and not received):
      ended: list[Outcome] = []
      while waiting and len(running) < num_jobs and not received:
        started = _start(waiting.pop(0))
        if isinstance(started, Outcome):
          ended.append(started)
        else:
          running.append(started)
      time.sleep(_POLL_SECONDS)
      for number in received[num_forwarded:]:
        progress.write(f"{signal.Signals(number).name}: stopping the trials")
        num_forwarded += 1
        # Training has no handler for SIGHUP.
        sent = signal.SIGTERM if number == signal.SIGHUP else number
        for attempt in running:
          attempt.process.send_signal(sent)
      for attempt in list(running):
        if attempt.process.poll() is not None:
          running.remove(attempt)
          ended.append(_outcome(attempt))
      for outcome in ended:
        outcomes[outcome.trial.workdir] = outcome
        progress.finish(outcome)
      progress.update(attempt.trial for attempt in running)
  if received:
    raise StoppedError("stopped; the same command continues the comparison")
  return [outcomes[trial.workdir] for trial in trials]


def _existing(trial: Trial) -> Outcome | None:
  """The outcome of a trial that is complete or cannot be trained."""
  try:
    return Outcome(trial, None) if trial.is_complete() else None
  except (UserError, OSError, ValueError) as error:
    return Outcome(trial, str(error))


def _start(trial: Trial) -> _Attempt | Outcome:
  """Starts a process in its own session, which receives no Ctrl-C."""
  try:
    trial.workdir.mkdir(parents=True, exist_ok=True)
    with (trial.workdir / LOG).open("a", encoding="utf-8") as log:
      log_start = log.seek(0, io.SEEK_END)
      process = subprocess.Popen(
        trial.command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
  except OSError as error:
    path = error.filename or trial.workdir
    return Outcome(trial, f"{path}: {error.strerror}")
  return _Attempt(trial, process, log_start)


def _outcome(attempt: _Attempt) -> Outcome:
  """The outcome of a process that has ended, with the last error it logged."""
  code, log = attempt.process.returncode, attempt.trial.workdir / LOG
  if code == 0:
    return Outcome(attempt.trial, None)
  text = log.read_bytes()[attempt.log_start :].decode(errors="replace")
  lines = [line.strip() for line in text.splitlines() if line.strip()]
  errors = [line for line in lines if "error:" in line.lower()]
  reason = [*lines[-1:], *errors[-1:]] or ["no output"]
  return Outcome(attempt.trial, f"exit code {code}: {reason[-1]} ({log})")


def _terminate(running: Iterable[_Attempt]) -> None:
  for attempt in running:
    attempt.process.terminate()


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
  """The numbers of the stop signals received so far."""
  received: list[int] = []
  previous = {
    number: signal.signal(number, lambda number, _: received.append(number))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
  }
  try:
    yield received
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)


class _Progress:
  """A progress bar over the steps of all incomplete trials."""

  def __init__(self, waiting: Sequence[Trial], num_trials: int):
    self._steps = {t.workdir: t.raw["train"]["steps"] for t in waiting}
    self._done = {trial.workdir: last_step(trial) for trial in waiting}
    self._num_waiting, self._num_trials = len(waiting), num_trials
    self._bar = tqdm(
      total=sum(self._steps.values()),
      initial=sum(self._done.values()),
      disable=not waiting,
      unit="step",
      dynamic_ncols=True,
      mininterval=0.1 if has_terminal() else _LOG_SECONDS,
      miniters=1,
    )
    self._describe()

  def close(self) -> None:
    """Ends the bar."""
    self._bar.close()

  def write(self, line: str) -> None:
    """Prints a line above the bar."""
    self._bar.write(line, file=sys.stderr)

  def finish(self, outcome: Outcome) -> None:
    """Counts a trial that has ended."""
    trial = outcome.trial
    self._num_waiting -= 1
    # A failure or early stopping may have ended it before its last step.
    self._steps[trial.workdir] = self._done[trial.workdir] = last_step(trial)
    self._bar.total = sum(self._steps.values())
    self.write(f"{trial.name}: {outcome.error or 'done'}")
    self._describe()

  def update(self, trials: Iterable[Trial]) -> None:
    """Advances the bar to the last steps that the trials have logged."""
    self._done |= {trial.workdir: last_step(trial) for trial in trials}
    self._bar.update(sum(self._done.values()) - self._bar.n)

  def _describe(self) -> None:
    num_complete = self._num_trials - self._num_waiting
    self._bar.set_description(f"{num_complete}/{self._num_trials} trials")


def last_step(trial: Trial) -> int:
  """The last step in the metrics.jsonl of a trial, or 0."""
  path = trial.workdir / METRICS
  try:
    with path.open("rb") as file:
      file.seek(max(path.stat().st_size - 4096, 0))
      lines = file.read().splitlines()
    return int(json.loads(lines[-1])["step"])
  except (OSError, IndexError, ValueError, KeyError):
    return 0
