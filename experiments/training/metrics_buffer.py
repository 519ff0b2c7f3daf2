"""Keeps the metrics of steps on the device until they are logged."""

import math
from collections import deque
from collections.abc import Callable

import jax

from experiments.errors import UserError
from experiments.optimization.step import FINITE
from experiments.progress import Progress
from experiments.training.metrics_writer import MetricsWriter

# Steps in flight before the metrics of the oldest are fetched, so that the
# device always has a next step to run.
_LAG = 2
_MAX_MESSAGES = 3  # about skipped updates; the rest are only counted


class MetricsBuffer:
  """Fetches the metrics of steps two steps late, checks and writes them."""

  def __init__(
    self,
    writer: MetricsWriter,
    progress: Progress,
    *,
    log_every: int,
    explain: Callable[[int], str],
    skips: bool = False,
    skipped: int = 0,
  ):
    """Starts with no step.

    Args:
      writer: receives the metrics of every `log_every`-th step.
      progress: is advanced at every step.
      log_every: steps between lines of metrics.
      explain: describes a non-finite step in the error message.
      skips: whether the train step skips non-finite updates; otherwise they
        raise.
      skipped: number of updates skipped before this process began.
    """
    self._writer, self._progress = writer, progress
    self._log_every, self._explain = log_every, explain
    self._skips, self.skipped = skips, skipped
    self._pending: deque[tuple[int, dict[str, jax.Array]]] = deque()

  def push(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Adds the metrics of a step, still on the device.

    Raises UserError if those of an earlier step were not finite.
    """
    self._pending.append((step, metrics))
    while len(self._pending) > _LAG:
      self._flush_one()

  def drain(self) -> None:
    """Flushes all metrics; raises UserError if some were not finite."""
    while self._pending:
      self._flush_one()

  def _flush_one(self) -> None:
    step, on_device = self._pending.popleft()
    values = {name: float(x) for name, x in jax.device_get(on_device).items()}
    tokens = int(values.pop("tokens"))
    bad = [name for name in FINITE if not math.isfinite(values[name])]
    if bad:
      problem = f"step {step}: {bad[0]} is {values[bad[0]]}"
      if not self._skips:
        raise UserError(f"{problem}; {self._explain(step)}")
      self._count_skipped(problem)
      values = {name: x for name, x in values.items() if math.isfinite(x)}
    if self.skipped:
      values["skipped"] = self.skipped
    shown = {name: values[name] for name in ("loss",) if name in values}
    self._progress.advance(1, tokens=tokens, metrics=shown)
    if step % self._log_every == 0:
      self._writer.metrics(step, "train", values)

  def _count_skipped(self, problem: str) -> None:
    self.skipped += 1
    if self.skipped <= _MAX_MESSAGES:
      last = " (further ones are only counted)" * (
        self.skipped == _MAX_MESSAGES
      )
      self._progress.write(
        f"{problem}: update skipped, {self.skipped} so far{last}"
      )
