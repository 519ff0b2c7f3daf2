"""Writes metrics.jsonl (reproducible) and timings.jsonl, and tracks both."""

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import jax

from experiments.run_directory import LocalFiles, write_text
from experiments.training.trackers import Tracker

METRICS, TIMINGS = "metrics.jsonl", "timings.jsonl"


class MetricsWriter:
  """Appends metrics to the files of a run, and sends them to its tracker."""

  def __init__(
    self, workdir: Path, step: int, make_tracker: Callable[[], Tracker]
  ):
    """Removes lines after `step`, the last one; only process 0 writes."""
    self.workdir, self._make_tracker = workdir, make_tracker
    self._files: dict[str, TextIO] = {}
    self._tracker: Tracker | None = None
    if jax.process_index() != 0:
      return
    self._local = LocalFiles(workdir, (METRICS, TIMINGS))
    for name in (METRICS, TIMINGS):
      path = self._local.path / name
      _truncate(path, step)
      self._files[name] = path.open("a", encoding="utf-8")

  def metrics(self, step: int, split: str, values: Mapping[str, float]):
    """Writes metrics of a split at a step."""
    self._write(METRICS, step, split, values)

  def timings(self, step: int, split: str, values: Mapping[str, float]):
    """Writes timings of a split at a step."""
    self._write(TIMINGS, step, split, values)

  def upload(self) -> None:
    """Copies the files to the run directory, if it is remote."""
    if self._files:
      self._local.upload()

  def close(self) -> None:
    """Closes the files."""
    # A tracker has a copy of the metrics, which report a full disk.
    with contextlib.suppress(OSError):
      if self._tracker:
        self._tracker.close()
    for file in self._files.values():
      file.close()
    if self._files:
      self._local.close()

  def _write(self, name: str, step: int, split: str, values):
    if not self._files:
      return
    line: dict[str, Any] = {"step": step, "split": split, **values}
    try:
      self._files[name].write(json.dumps(line) + "\n")
      self._files[name].flush()
    except OSError as error:  # without a file name
      path = str(self.workdir / name)
      raise OSError(error.errno, error.strerror, path) from error
    if self._tracker is None:
      # Its import takes seconds, during which the device has steps to compute.
      self._tracker = self._make_tracker()
    named = {f"{split}/{key}": value for key, value in values.items()}
    self._tracker.log(step, named)


def _truncate(path: Path, step: int) -> None:
  """Keeps the complete lines of a file up to a step."""
  if not path.exists():
    return
  kept = []
  for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
    try:
      record = json.loads(line)
    except json.JSONDecodeError:  # truncated by a kill
      break
    if record["step"] <= step:
      kept.append(line)
  write_text(path, "".join(kept))
