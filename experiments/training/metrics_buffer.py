"""Watching the steps go by without making them wait."""

import math
from collections import deque
from collections.abc import Callable

import jax

from experiments.errors import UserError
from experiments.optimization.step import FINITE
from experiments.progress import Progress
from experiments.training.metrics_writer import Writer

# Steps under way before the oldest one's metrics are fetched: the device
# always has the next step to go on with.
_LAG = 2
# Of skipped updates, the first ones are told one by one.
_TOLD = 3


class Watch:
  """Fetches the metrics of steps a little late, checks and writes them.

  Example:
    >>> from pathlib import Path
    >>> writer = Writer(Path("unused"), step=0, active=False)
    >>> progress = Progress(total=1, start=0, visible=False)
    >>> watch = Watch(writer, progress, log_every=1, explain=str)
    >>> watch.push(
    ...   1, dict(loss=0.5, gradient_norm=1.0, parameter_norm=2.0, tokens=8)
    ... )
    >>> watch.drain()
    >>> progress.steps, progress.tokens
    (1, 8)
  """

  def __init__(
    self,
    writer: Writer,
    progress: Progress,
    *,
    log_every: int,
    explain: Callable[[int], str],
    skips: bool = False,
  ):
    """Begins to watch.

    Args:
      writer: gets the metrics of every `log_every`-th step.
      progress: is moved at every step.
      log_every: steps between lines of metrics.
      explain: says for a bad step where its batch stood and what to go back
        to.
      skips: whether updates that were not finite have been skipped: they are
        counted, where they otherwise end the run.
    """
    self._writer, self._progress = writer, progress
    self._log_every, self._explain = log_every, explain
    self._skips, self.skipped = skips, 0
    self._pending: deque[tuple[int, dict[str, jax.Array]]] = deque()

  def push(self, step: int, metrics: dict[str, jax.Array]) -> None:
    """Takes the metrics of a step, and looks at those of an earlier one.

    Args:
      step: its number.
      metrics: scalars, still on the device: loss, gradient_norm, tokens and
        others.

    Raises:
      UserError: if the earlier step's loss or gradient was not finite.
    """
    self._pending.append((step, metrics))
    while len(self._pending) > _LAG:
      self._look()

  def drain(self) -> None:
    """Looks at all that is pending; then every step so far was finite.

    Raises:
      UserError: if one was not.
    """
    while self._pending:
      self._look()

  def _look(self) -> None:
    step, on_device = self._pending.popleft()
    values = {name: float(x) for name, x in jax.device_get(on_device).items()}
    tokens = int(values.pop("tokens"))
    bad = [name for name in FINITE if not math.isfinite(values[name])]
    if bad:
      what = f"step {step}: {bad[0]} is {values[bad[0]]}"
      if not self._skips:
        raise UserError(f"{what}; {self._explain(step)}")
      self._skip(what)
      values = {name: x for name, x in values.items() if math.isfinite(x)}
    if self.skipped:
      values["skipped"] = self.skipped
    shown = {name: values[name] for name in ("loss",) if name in values}
    self._progress.advance(1, tokens=tokens, metrics=shown)
    if step % self._log_every == 0:
      self._writer.metrics(step, "train", values)

  def _skip(self, what: str) -> None:
    self.skipped += 1
    if self.skipped <= _TOLD:
      last = " (further ones are only counted)" * (self.skipped == _TOLD)
      self._progress.write(
        f"{what}: update skipped, {self.skipped} so far{last}"
      )
