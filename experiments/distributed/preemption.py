"""Preemption: SIGTERM and Ctrl-C stop a process after a step or a batch."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from experiments.distributed.exit import exit_process
from experiments.errors import AGAIN

_INTERRUPTED = 130


class StopSignals:
  """Whether this process has received a signal to stop."""

  def __init__(self, unit: str):
    self._unit = unit
    self._requested = False
    self._nothing_to_save = False

  def should_stop(self, step: int) -> bool:
    """Returns whether to save and stop after `step`."""
    if jax.process_count() > 1:
      # True for all processes at the same step. Needs a call for every step.
      return multihost_utils.reached_preemption_sync_point(step)
    return self._requested

  def nothing_to_save(self) -> None:
    """Makes a single process stop at once, since its state is saved."""
    self._nothing_to_save = True
    if self._requested:
      self._stop_at_once()

  def receive(self, number: int) -> None:
    """Handles SIGINT or SIGTERM, in any thread."""
    if self._requested and number == signal.SIGINT:
      _print("interrupted")
      exit_process(_INTERRUPTED)
    self._requested = True
    name = signal.Signals(number).name
    if jax.process_count() > 1:
      # JAX handles SIGTERM itself and notifies the other processes.
      os.kill(os.getpid(), signal.SIGTERM)
    elif self._nothing_to_save:
      self._stop_at_once()
    _print(f"\n{name}: stopping after this {self._unit}")

  def _stop_at_once(self) -> None:
    if jax.process_count() == 1:
      _print("stopped; the same command resumes")
      exit_process(AGAIN)


@contextlib.contextmanager
def listen(unit: str = "step") -> Iterator[StopSignals]:
  """Turns SIGTERM and SIGINT into stop requests, handled by a thread.

  An exception of a signal handler could be lost: Python ignores exceptions in
  callbacks of the garbage collector, of which JAX has one.

  Args:
    unit: what is completed before the process stops; for a message.
  """
  signals = StopSignals(unit)
  numbers = [signal.SIGINT]
  if jax.process_count() == 1:
    numbers.append(signal.SIGTERM)
  receiver, sender = os.pipe()
  os.set_blocking(sender, False)
  thread = threading.Thread(
    target=_receive_all, args=(receiver, signals), daemon=True
  )
  thread.start()
  # Python writes a byte to `sender` only for signals that have a handler.
  before = {each: signal.signal(each, lambda *_: None) for each in numbers}
  last = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
  try:
    yield signals
  finally:
    signal.set_wakeup_fd(last)
    for number, handler in before.items():
      signal.signal(number, handler)
    os.close(sender)
    thread.join()
    os.close(receiver)


def _receive_all(receiver: int, signals: StopSignals) -> None:
  """Handles each signal number that the pipe contains, until it closes."""
  while numbers := os.read(receiver, 1):
    signals.receive(numbers[0])


def _print(line: str) -> None:
  with contextlib.suppress(OSError, ValueError):  # standard error is closed
    print(line, file=sys.stderr, flush=True)
