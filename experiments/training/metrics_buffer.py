"""Keeps the metrics of steps on the device until they are logged."""

import math
from collections import deque
from collections.abc import Callable

import jax

from experiments.config import TrainConfig
from experiments.errors import UserError
from experiments.optimization.step import FINITE
from experiments.progress import Progress
from experiments.training.metrics_writer import MetricsWriter

_LAG = 2  # steps that are dispatched before metrics are fetched
_MAX_MESSAGES = 3  # about skipped updates


class MetricsBuffer:
  """Writes metrics two steps late: the device never waits for the host."""

  def __init__(
    self,
    writer: MetricsWriter,
    progress: Progress,
    config: TrainConfig,
    explain: Callable[[int], str],  # the cause of a non-finite step
    skipped: int,  # number of non-finite updates so far
  ):
    self.writer, self.progress, self._config = writer, progress, config
    self._explain, self.skipped = explain, skipped
    self._timed = False  # the first step
    self._pending: deque[tuple[int, dict[str, jax.Array]]] = deque()

  def push(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Adds a step; raises UserError if an earlier one was not finite."""
    if not self._timed:
      # Without the import of TensorBoard, which the first metrics need.
      jax.block_until_ready(metrics)
      seconds = self.progress.timings()["seconds"]
      self.writer.timings(step, "train", {"first_step_seconds": seconds})
      self._timed = True
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
      if self._config.non_finite == "stop":
        raise UserError(f"{problem}; {self._explain(step)}")
      self.skipped += 1
      if self.skipped <= _MAX_MESSAGES:
        self.progress.write(f"{problem}: update {self.skipped} is skipped")
      if self.skipped == _MAX_MESSAGES:
        self.progress.write("further skipped updates are only counted")
      values = {name: x for name, x in values.items() if math.isfinite(x)}
    if self.skipped:
      values["skipped"] = self.skipped
    shown = {name: values[name] for name in ("loss",) if name in values}
    self.progress.advance(tokens=tokens, metrics=shown)
    if step % self._config.log_every == 0:
      self.writer.metrics(step, "train", values)
