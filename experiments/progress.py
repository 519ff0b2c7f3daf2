"""Progress: tqdm bars on a terminal, lines in a log file."""

import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from tqdm import tqdm

# Seconds between two updates in a log file.
_LINE_EVERY = 10.0
# The size of a terminal that does not tell it, such as a container's.
_SIZE = {"ncols": 120, "nrows": 40}
# Number of last steps over which `timings` computes the median duration.
_NUM_DURATIONS = 200
_BAR = "{percentage:3.0f}%|{bar:20}| "
_COUNT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
_LINE = "{desc}{percentage:3.0f}% " + _COUNT


@contextmanager
def counting(
  unit: str,
  *,
  description: str | None = None,
  total: int | None = None,
  initial: int = 0,
  hidden: bool = False,
) -> Iterator[Callable[[float], Any]]:
  """Shows a count on a terminal; yields a function that adds to it."""
  # With a total it shows the time left, and in a log file it writes lines.
  terminal = on_terminal()
  with make_bar(
    total,
    f" {unit}",
    initial=initial,
    hidden=hidden or _is_hidden() or (total is None and not terminal),
    desc=description,
    leave=False,
    delay=0.0 if terminal else _LINE_EVERY,
  ) as bar:
    yield bar.update


def without_bars() -> AbstractContextManager[None]:
  """Clears the bars of a terminal while other lines are printed."""
  return tqdm.external_write_mode()


def on_terminal() -> bool:
  """Whether standard error is a terminal."""
  return sys.stderr.isatty()


def make_bar(
  total: float | None,
  unit: str,
  *,
  initial: float = 0,
  hidden: bool = False,
  line: str | None = None,
  **options: Any,  # of tqdm
) -> tqdm:
  """A bar on a terminal, and lines in a log file; `line` is their format."""
  shown: dict[str, Any] = {"bar_format": line and _BAR + line}
  if not on_terminal():
    shown = {"bar_format": line or _LINE, "mininterval": _LINE_EVERY}
    shown["file"] = _Lines()
  elif all(os.get_terminal_size(sys.stderr.fileno())):
    shown["dynamic_ncols"] = True
  else:  # columns or lines are 0, where tqdm shows nothing
    shown |= _SIZE
  return tqdm(
    total=total,
    unit=unit,
    initial=initial,
    disable=hidden,
    **shown,
    **options,
  )


def _is_hidden() -> bool:
  """Whether this is another process than the first, which shows progress."""
  return jax.process_index() != 0


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
      self._bar = make_bar(
        self._total,
        "step",
        initial=self._first,
        hidden=_is_hidden(),
        line="step " + _COUNT,
      )
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
    if not _is_hidden():
      tqdm.write(line, file=sys.stderr)

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_) -> None:
    if self._bar is not None:
      self._bar.close()
