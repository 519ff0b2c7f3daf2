"""Watching the steps go by without making them wait."""

import math
from collections import deque
from collections.abc import Callable

import jax

from experiments.errors import UserError
from experiments.progress import Progress
from experiments.writer import Writer

# Steps under way before the oldest one's metrics are fetched: the device
# always has the next step to go on with.
_LAG = 2
# Parameters too: an update can spoil what the loss before it does not show.
_FINITE = ("loss", "gradient_norm", "parameter_norm")


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
  ):
    """Begins to watch.

    Args:
      writer: gets the metrics of every `log_every`-th step.
      progress: is moved at every step.
      log_every: steps between lines of metrics.
      explain: says for a bad step where its batch stood and what to go back
        to.
    """
    self._writer, self._progress = writer, progress
    self._log_every, self._explain = log_every, explain
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
    for name in _FINITE:
      if not math.isfinite(values[name]):
        raise UserError(
          f"step {step}: {name} is {values[name]}; {self._explain(step)}"
        )
    self._progress.advance(1, tokens=tokens, metrics={"loss": values["loss"]})
    if step % self._log_every == 0:
      self._writer.metrics(step, "train", values)
