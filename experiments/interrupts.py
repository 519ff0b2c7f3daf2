"""Asking a run to stop: SIGTERM and Ctrl-C, heard between two steps."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
from jax.experimental import multihost_utils


@contextmanager
def listen() -> Iterator[Callable[[int], bool]]:
  """Turns SIGTERM and SIGINT into a question; a second SIGINT stops at once.

  With several processes, JAX's own preemption notice decides, so that all of
  them stop after the same step.

  Yields:
    A function of the step, which tells whether to stop after it.

  Example:
    >>> with listen() as should_stop:
    ...   should_stop(1)
    False
  """
  asked: list[int] = []

  def remember(number, _):
    if asked and number == signal.SIGINT:
      raise KeyboardInterrupt
    asked.append(number)
    if jax.process_count() > 1:
      # JAX hears SIGTERM by itself, and tells the other processes.
      os.kill(os.getpid(), signal.SIGTERM)
    print(
      f"\n{signal.Signals(number).name}: stopping after this step",
      file=sys.stderr,
      flush=True,
    )

  def should_stop(step: int) -> bool:
    if jax.process_count() > 1:
      return multihost_utils.reached_preemption_sync_point(step)
    return bool(asked)

  signals = [signal.SIGINT]
  if jax.process_count() == 1:
    signals.append(signal.SIGTERM)
  before = {number: signal.signal(number, remember) for number in signals}
  try:
    yield should_stop
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
