"""The progress of long work: step, loss, rates and time left."""

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from tqdm import tqdm

# Where nobody watches, as in a log file: seconds between two lines.
_LINE_EVERY = 10.0
# Steps whose usual duration is told.
_NUM_DURATIONS = 200


def has_terminal() -> bool:
  """Whether a bar can be seen: some recorders are terminals of no width.

  Returns:
    Whether standard error is a terminal that shows something.

  Example:
    >>> has_terminal()  # doctest: +SKIP
    True
  """
  if not sys.stderr.isatty():
    return False
  return os.get_terminal_size(sys.stderr.fileno()).columns > 0


@contextmanager
def counting(unit: str) -> Iterator[Callable[[int], Any]]:
  """Shows on a terminal how many things of unknown number are done.

  Args:
    unit: what is counted, in the plural.

  Yields:
    A function to be called with the number done since the last call.

  Example:
    >>> with counting("lines") as done:
    ...   done(3)
  """
  with tqdm(
    unit=f" {unit}",
    disable=not has_terminal() or jax.process_index() != 0,
    dynamic_ncols=True,
    leave=False,
  ) as bar:
    yield bar.update


class Progress:
  """A bar on a terminal; elsewhere a line now and then.

  Attributes:
    steps: made since the bar began.
    tokens: target tokens seen since the bar began.

  Example:
    >>> with Progress(total=2, start=0, visible=False) as progress:
    ...   progress.advance(1, tokens=10, metrics={"loss": 1.0})
  """

  def __init__(self, total: int, start: int, visible: bool | None = None):
    """Begins at `start` of `total` steps; only process 0 shows anything."""
    if visible is None:
      visible = jax.process_index() == 0
    self.steps, self.tokens = 0, 0
    self._total, self._start = total, start
    self._lines = visible and not has_terminal()
    self._bar = tqdm(
      total=total,
      initial=start,
      disable=not visible or self._lines,
      unit="step",
      dynamic_ncols=True,
      bar_format=(
        "{percentage:3.0f}%|{bar:20}| step {n_fmt}/{total_fmt}"
        " [{elapsed}<{remaining}{postfix}]"
      ),
    )
    self._since = self._said = self._last = time.perf_counter()
    self._durations: deque[float] = deque(maxlen=_NUM_DURATIONS)

  def advance(
    self, steps: int, *, tokens: int, metrics: Mapping[str, float]
  ) -> None:
    """Moves the bar.

    Args:
      steps: how many were made.
      tokens: target tokens in them.
      metrics: shown beside the rates.
    """
    self.steps += steps
    self.tokens += tokens
    now = time.perf_counter()
    self._durations.append((now - self._last) / max(steps, 1))
    self._last = now
    rates = self.timings()
    shown = ", ".join(
      [f"{name} {value:.4g}" for name, value in metrics.items()]
      + [
        f"{rates['steps_per_second']:.3g} steps/s",
        f"{rates['tokens_per_second']:,.0f} tokens/s",
      ]
    )
    self._bar.set_postfix_str(shown, refresh=False)
    self._bar.update(steps)
    if self._lines:
      self._say(shown, rates["steps_per_second"])

  def timings(self) -> dict[str, float]:
    """Returns the seconds since the bar began, the rates, and a usual step.

    The rates count everything, as the bar's end does; `step_milliseconds` is
    the median of the last steps, whatever was compiled or evaluated between.
    """
    seconds = max(time.perf_counter() - self._since, 1e-9)
    return {
      "seconds": seconds,
      "steps_per_second": self.steps / seconds,
      "tokens_per_second": self.tokens / seconds,
      "step_milliseconds": 1e3 * statistics.median(self._durations or [0.0]),
    }

  def write(self, line: str) -> None:
    """Prints a line above the bar."""
    if self._lines:
      print(line, file=sys.stderr, flush=True)
    elif not self._bar.disable:
      self._bar.write(line, file=sys.stderr)

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_) -> None:
    self._bar.close()

  def _say(self, shown: str, rate: float) -> None:
    """Prints a line, if the last one is long ago or there will be no other."""
    step = self._start + self.steps
    now = time.perf_counter()
    if step < self._total and now - self._said < _LINE_EVERY:
      return
    self._said = now
    left = tqdm.format_interval((self._total - step) / rate)
    self.write(f"step {step}/{self._total}: {shown}, {left} left")
