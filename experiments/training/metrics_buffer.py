"""Keeps the metrics of steps on the device until they are logged."""

import math
from collections import deque
from collections.abc import Callable

import jax

from experiments.errors import UserError
from experiments.optimization.step import FINITE
from experiments.progress import Progress
from experiments.training.metrics_writer import MetricsWriter

_LAG = 2  # steps that are dispatched before metrics are fetched
_MAX_MESSAGES = 3  # about skipped updates


class MetricsBuffer:
  """Fetches, checks and writes metrics two steps late.

  So the device never waits for the host.
  """

  def __init__(
    self,
    writer: MetricsWriter,
    progress: Progress,
    *,
    log_every: int,
    explain: Callable[[int], str],
    skips: bool,
    skipped: int,
  ):
    """Counts non-finite updates, from `skipped`, if `skips`; else raises."""
    self._writer, self._progress = writer, progress
    self._log_every, self._explain = log_every, explain
    self._skips, self.skipped = skips, skipped
    self._pending: deque[tuple[int, dict[str, jax.Array]]] = deque()

  def push(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Adds a step; raises UserError if an earlier one was not finite."""
    self._pending.append((step, metrics))
    while len(self._pending) > _LAG:
      self._flush_one()

  def drain(self) -> None:
    """Writes all metrics; raises UserError if some are not finite."""
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
      self.skipped += 1
      if self.skipped <= _MAX_MESSAGES:
        is_last = self.skipped == _MAX_MESSAGES
        rest = " (further ones are only counted)" if is_last else ""
        self._progress.write(
          f"{problem}: update skipped, {self.skipped} so far{rest}"
        )
      values = {name: x for name, x in values.items() if math.isfinite(x)}
    if self.skipped:
      values["skipped"] = self.skipped
    shown = {name: values[name] for name in ("loss",) if name in values}
    self._progress.advance(1, tokens=tokens, metrics=shown)
    if step % self._log_every == 0:
      self._writer.metrics(step, "train", values)
