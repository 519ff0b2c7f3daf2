"""Trains the trials of a comparison, each in a process of its own."""

import contextlib
import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from experiments.comparison.grid import Trial
from experiments.errors import StoppedError, UserError
from experiments.progress import make_bar
from experiments.training.metrics_writer import METRICS

LOG = "train.log"
_POLL_SECONDS = 0.2


class Outcome(NamedTuple):
  """The result of training a trial."""

  trial: Trial
  error: str | None  # None if the trial is complete


class _Attempt(NamedTuple):
  """A process that trains a trial."""

  trial: Trial
  process: subprocess.Popen
  log_start: int  # byte of the log at which the output of this process begins


def run(trials: Sequence[Trial], num_jobs: int) -> list[Outcome]:
  """Trains incomplete trials, `num_jobs` at a time; returns all outcomes."""
  existing = {trial.workdir: _existing(trial) for trial in trials}
  outcomes = {workdir: each for workdir, each in existing.items() if each}
  incomplete = [trial for trial in trials if trial.workdir not in outcomes]
  waiting, running = list(incomplete), list[_Attempt]()
  stopped = False
  with _stop_signals() as signals, _progress_bar(incomplete) as bar:
    try:
      for outcome in outcomes.values():
        if outcome.error:
          _report(outcome, bar)
      while waiting or running:
        ended = _start_next(waiting, running, num_jobs)
        time.sleep(_POLL_SECONDS)
        # Trials save a checkpoint and stop; on a second SIGINT without saving.
        while signals:
          stopped = True
          waiting.clear()
          _send(signals.pop(0), running, bar)
        ended += _remove_ended(running)
        for outcome in ended:
          if not stopped or not outcome.error:  # else it is to be continued
            outcomes[outcome.trial.workdir] = outcome
          _report(outcome, bar)
        num_complete = f"{len(outcomes)}/{len(trials)} trials"
        bar.set_description(num_complete, refresh=False)
        bar.update(sum(_steps_done(t, outcomes) for t in incomplete) - bar.n)
    finally:
      for attempt in running:
        attempt.process.terminate()
  if stopped:
    raise StoppedError("stopped; the same command continues the comparison")
  return [outcomes[trial.workdir] for trial in trials]


def _report(outcome: Outcome, bar: tqdm) -> None:
  """Writes the outcome of a trial above the bar."""
  text = f"{outcome.trial.name}: {outcome.error or 'done'}"
  bar.write(text, file=sys.stderr)


def _existing(trial: Trial) -> Outcome | None:
  """The outcome of a trial that is complete or cannot be trained."""
  try:
    return Outcome(trial, None) if trial.is_complete() else None
  except (UserError, OSError, ValueError) as error:
    return Outcome(trial, str(error))


def _start_next(
  waiting: list[Trial], running: list[_Attempt], num_jobs: int
) -> list[Outcome]:
  """Starts trials while fewer than `num_jobs` run; returns those that fail."""
  failed = []
  while waiting and len(running) < num_jobs:
    trial = waiting.pop(0)
    try:
      running.append(_start(trial))
    except OSError as error:
      path = error.filename or trial.workdir
      failed.append(Outcome(trial, f"{path}: {error.strerror}"))
  return failed


def _start(trial: Trial) -> _Attempt:
  """Starts a process in its own session, which receives no Ctrl-C."""
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
  return _Attempt(trial, process, log_start)


def _send(number: int, running: Iterable[_Attempt], bar: tqdm) -> None:
  """Sends a stop signal to the trials; training has no handler for SIGHUP."""
  name = signal.Signals(number).name
  bar.write(f"{name}: stopping the trials", file=sys.stderr)
  for attempt in running:
    sent = signal.SIGTERM if number == signal.SIGHUP else number
    attempt.process.send_signal(sent)


def _remove_ended(running: list[_Attempt]) -> list[Outcome]:
  """Removes the trials that have ended; returns their outcomes."""
  ended = [each for each in running if each.process.poll() is not None]
  for attempt in ended:
    running.remove(attempt)
  return [_outcome(attempt) for attempt in ended]


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


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
  """Yields a list that gets the numbers of the stop signals."""
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


def _progress_bar(incomplete: Sequence[Trial]) -> tqdm:
  """A bar over the steps of all incomplete trials."""
  # This process leaves accelerators to those of the trials.
  return make_bar(
    sum(trial.raw["train"]["steps"] for trial in incomplete),
    "step",
    initial=sum(map(last_logged_step, incomplete)),
    hidden=not incomplete,
    miniters=1,
  )


def _steps_done(trial: Trial, outcomes: Mapping[Path, Outcome]) -> int:
  """The steps of a trial that are done; all if it is complete."""
  outcome = outcomes.get(trial.workdir)
  is_complete = outcome is not None and outcome.error is None
  return trial.raw["train"]["steps"] if is_complete else last_logged_step(trial)


def last_logged_step(trial: Trial) -> int:
  """The last step in the metrics.jsonl of a trial, or 0."""
  try:
    with (trial.workdir / METRICS).open("rb") as file:
      file.seek(-min(file.seek(0, io.SEEK_END), 4096), io.SEEK_END)
      return int(json.loads(file.readlines()[-1])["step"])
  except (OSError, IndexError, ValueError, KeyError):
    return 0
