"""Asking a run to stop: SIGTERM and Ctrl-C, heard between two steps."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from experiments.distributed import initialize
from experiments.errors import AGAIN

_INTERRUPTED = 130


class Requests:
  """What a process has been asked, by signals.

  Example:
    >>> requests = Requests()
    >>> requests.should_stop(1)
    False
  """

  def __init__(self):
    """Begins with none."""
    self._asked = False
    self._nothing_to_save = False

  def should_stop(self, step: int) -> bool:
    """Returns whether to stop after a step.

    With several processes, JAX's own preemption notice decides, so that all of
    them stop after the same step.

    Args:
      step: its number, greater by one than at the last call.

    Returns:
      Whether to save and stop.
    """
    if jax.process_count() > 1:
      return multihost_utils.reached_preemption_sync_point(step)
    return self._asked

  def nothing_to_save(self) -> None:
    """Tells that all is saved: a process that is alone stops at once."""
    self._nothing_to_save = True
    if self._asked:
      self._stop_at_once()

  def hear(self, number: int) -> None:
    """Takes a signal, in whatever thread.

    Args:
      number: SIGINT or SIGTERM.
    """
    if self._asked and number == signal.SIGINT:
      _say("interrupted")
      initialize.leave(_INTERRUPTED)
    self._asked = True
    name = signal.Signals(number).name
    if jax.process_count() > 1:
      # JAX hears SIGTERM by itself, and tells the other processes.
      os.kill(os.getpid(), signal.SIGTERM)
    elif self._nothing_to_save:
      self._stop_at_once()
    _say(f"\n{name}: stopping after this step")

  def _stop_at_once(self) -> None:
    if jax.process_count() == 1:
      _say("stopped; the same command goes on")
      initialize.leave(AGAIN)


@contextlib.contextmanager
def listen() -> Iterator[Requests]:
  """Turns SIGTERM and SIGINT into requests; a second SIGINT stops at once.

  A thread of its own hears them: the main one may be deep in a step or a
  compilation, where Python hears nothing.

  Yields:
    What the process is asked.

  Example:
    >>> with listen() as requests:
    ...   requests.should_stop(1)
    False
  """
  requests = Requests()
  signals = [signal.SIGINT]
  if jax.process_count() == 1:
    signals.append(signal.SIGTERM)
  receiver, sender = os.pipe()
  os.set_blocking(sender, False)
  thread = threading.Thread(
    target=_hear_all, args=(receiver, requests), daemon=True
  )
  thread.start()
  # Without a handler of Python's there is no byte for a signal.
  before = {each: signal.signal(each, lambda *_: None) for each in signals}
  last = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
  try:
    yield requests
  finally:
    signal.set_wakeup_fd(last)
    for number, handler in before.items():
      signal.signal(number, handler)
    os.close(sender)
    thread.join()
    os.close(receiver)


def _hear_all(receiver: int, requests: Requests) -> None:
  """Hears of each signal by a byte, until nobody is left to send one."""
  while numbers := os.read(receiver, 1):
    requests.hear(numbers[0])


def _say(line: str) -> None:
  with contextlib.suppress(OSError, ValueError):  # nobody reads any more
    print(line, file=sys.stderr, flush=True)
