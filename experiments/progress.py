"""The progress bar of long work: step, loss, rates and time left."""

import sys
import time
from collections.abc import Mapping

import jax
from tqdm import tqdm


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
    terminal = sys.stderr.isatty()
    self._bar = tqdm(
      total=total,
      initial=start,
      disable=not visible,
      unit="step",
      smoothing=0.1,
      dynamic_ncols=True,
      mininterval=0.2 if terminal else 10.0,
      # Steps of very different length must not hide the bar for long.
      maxinterval=1.0 if terminal else 10.0,
      bar_format=(
        "{percentage:3.0f}%|{bar:20}| step {n_fmt}/{total_fmt}"
        " [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
      ),
    )
    self.steps, self.tokens = 0, 0
    self._since = time.perf_counter()

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
    rate = self.timings()["tokens_per_second"]
    shown = [f"{name} {value:.4g}" for name, value in metrics.items()]
    self._bar.set_postfix_str(
      ", ".join([*shown, f"{rate:,.0f} tokens/s"]), refresh=False
    )
    self._bar.update(steps)

  def timings(self) -> dict[str, float]:
    """Returns the seconds since the bar began, and the rates so far."""
    seconds = max(time.perf_counter() - self._since, 1e-9)
    return {
      "seconds": seconds,
      "steps_per_second": self.steps / seconds,
      "tokens_per_second": self.tokens / seconds,
    }

  def write(self, line: str) -> None:
    """Prints a line above the bar."""
    if not self._bar.disable:
      self._bar.write(line, file=sys.stderr)

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *_) -> None:
    self._bar.close()
