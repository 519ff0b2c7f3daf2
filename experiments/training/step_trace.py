"""Traces some training steps with JAX's profiler."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from absl import logging

from experiments.run_directory import LocalFiles

FOLDER = "profile"  # in the run directory
# Steps before the trace. They compile most shapes of batches.
_WARM_UP = 20


class StepTrace:
  """Traces `count` steps after the first ones; close it at the end."""

  def __init__(self, workdir: Path, count: int, *, warm_up: int = _WARM_UP):
    self._workdir = workdir
    self._first, self._last = warm_up + 1, warm_up + count
    self._steps = self._num_traced = 0
    self._is_tracing = False

  def step(self, number: int) -> AbstractContextManager[Any]:
    """The context of one step."""
    self._steps += 1
    if not self._first <= self._steps <= self._last:
      return nullcontext()
    if not self._is_tracing:
      self._files = LocalFiles(self._workdir)
      jax.profiler.start_trace(str(self._files.path / FOLDER))
      self._is_tracing = True
    self._num_traced += 1
    return jax.profiler.StepTraceAnnotation("train", step_num=number)

  def after(self, results: Any) -> None:
    """Ends the trace after its last step, whose results must be given."""
    if self._is_tracing and self._steps >= self._last:
      jax.block_until_ready(results)
      self.close()

  def close(self) -> None:
    """Writes the trace, if there is one, and logs how many steps it has."""
    wanted = self._last - self._first + 1
    if self._is_tracing:
      self._is_tracing = False
      jax.profiler.stop_trace()
      self._files.close()
      logging.info(
        "wrote a trace of %d of %d training steps to %s",
        self._num_traced,
        wanted,
        self._workdir / FOLDER,
      )
    elif wanted and not self._num_traced:
      logging.warning(
        "no step was traced: the first %d steps of a command are left out, and"
        " this one trained %d",
        self._first - 1,
        self._steps,
      )
