"""Progress: tqdm bars on a terminal, lines in a log file."""

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

# Seconds between two updates in a log file.
_LINE_EVERY = 10.0
# Number of last steps over which `timings` computes the median duration.
_NUM_DURATIONS = 200
_FORMAT = (
  "step {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
)


@contextmanager
def counting(
  unit: str,
  *,
  description: str | None = None,
  total: int | None = None,
  initial: int = 0,
) -> Iterator[Callable[[float], Any]]:
  """Shows a count on a terminal; yields a function that adds to it."""
  # With a total it shows the time left, and in a log file it writes lines.
  hidden = None if jax.process_index() == 0 else True  # None: in a file
  options: dict[str, Any] = {"disable": hidden, "dynamic_ncols": True}
  if total is not None and not sys.stderr.isatty():
    options = {"disable": bool(hidden), "file": _Lines(), "ncols": 0}
    options |= {"mininterval": _LINE_EVERY, "delay": _LINE_EVERY}
  with tqdm(
    desc=description,
    unit=f" {unit}",
    total=total,
    initial=initial,
    leave=False,
    **options,
  ) as bar:
    yield bar.update


class _Lines:
  """A file that writes each update of tqdm to standard error as a line."""

  def write(self, text: str) -> None:
    if line := text.strip():
      print(line, file=sys.stderr, flush=True)

  def flush(self) -> None:
    pass


class Progress:
  """A bar over training steps, which process 0 shows, and their timings."""

  # The bar begins after the first step, which is compiled: its rate and the
  # time left are those of the other steps.

  def __init__(self, total: int, start: int):
    self._total, self._first = total, start + 1
    self._steps, self._tokens = 0, 0  # since the start
    self._bar: tqdm | None = None
    self._bar_start, self._bar_tokens = 0.0, 0
    self._start = self._last = time.perf_counter()
    self._durations: deque[float] = deque(maxlen=_NUM_DURATIONS)

  def advance(self, *, tokens: int, metrics: Mapping[str, float]) -> None:
    """Adds a step and its number of target tokens; shows the metrics."""
    self._steps += 1
    self._tokens += tokens
    now = time.perf_counter()
    self._durations.append(now - self._last)
    self._last = now
    if self._bar is None:
      self._bar = _step_bar(self._total, self._first)
      self._bar_start = now
      return
    self._bar_tokens += tokens
    rate = self._bar_tokens / max(now - self._bar_start, 1e-9)
    shown = [f"{name} {value:.4g}" for name, value in metrics.items()]
    shown.append(f"{rate:,.0f} tokens/s")
    self._bar.set_postfix_str(", ".join(shown), refresh=False)
    self._bar.update()

  def timings(self) -> dict[str, float]:
    """Returns the seconds since the start, rates, and the median step."""
    # These include compilation and evaluation; the median step does not.
    seconds = max(time.perf_counter() - self._start, 1e-9)
    return {
      "seconds": seconds,
      "steps_per_second": self._steps / seconds,
      "tokens_per_second": self._tokens / seconds,
      "step_milliseconds": 1e3 * statistics.median(self._durations or [0.0]),
    }

  def write(self, line: str) -> None:
    """Prints a line above the bar."""
    if jax.process_index() == 0:
      tqdm.write(line, file=sys.stderr)

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_) -> None:
    if self._bar is not None:
      self._bar.close()


def _step_bar(total: int, initial: int) -> tqdm:
  """A bar on a terminal, lines elsewhere."""
  # tqdm shows nothing on a terminal of unknown width, such as a container's.
  file = sys.stderr
  terminal = file.isatty() and os.get_terminal_size(file.fileno()).columns > 0
  return tqdm(
    total=total,
    initial=initial,
    disable=jax.process_index() != 0,
    unit="step",
    file=file if terminal else _Lines(),
    dynamic_ncols=terminal,
    mininterval=0.1 if terminal else _LINE_EVERY,
    bar_format="{percentage:3.0f}%|{bar:20}| " * terminal + _FORMAT,
  )
