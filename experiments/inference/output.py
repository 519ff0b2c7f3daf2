"""Where results are written: standard output, or a file that continues."""

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from experiments.errors import UserError
from experiments.run_directory.lock import lock


class StandardOutput:
  """Writes lines to standard output."""

  num_groups = 0  # that are written

  def write(self, lines: Iterable[str]) -> None:
    """Writes lines."""
    for line in lines:
      print(line)
    sys.stdout.flush()

  def finish(self) -> None:
    """Nothing is left to do."""

  def close(self) -> None:
    """Leaves standard output open."""


class PartialFile:
  """Writes groups of lines to a hidden file, which `finish` renames."""

  # A second process with the same settings continues after the last complete
  # group; one with other settings has another hidden file.

  def __init__(
    self,
    path: Path,
    settings: Mapping[str, Any],
    group_size: int,
    *,
    continues: bool = True,  # else the hidden file is written anew
  ):
    if path.exists():
      raise UserError(f"--out={path}: exists; remove it, or use another name")
    text = json.dumps(settings, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    self._path, self._group_size = path, group_size
    self._draft = path.with_name(f".{path.name}.{digest}.partial")
    with self._naming_flag():
      path.parent.mkdir(parents=True, exist_ok=True)
      self._file = self._draft.open("a+b")
    if not lock(self._file, path):
      self._file.close()
      raise UserError(
        f"--out={path}: another process writes it; wait for its end, or use"
        " another name"
      )
    self.num_groups, end = self._complete_groups() if continues else (0, 0)
    self._file.truncate(end)

  def write(self, lines: Iterable[str]) -> None:
    """Appends the lines of complete groups."""
    written = [f"{line}\n" for line in lines]
    with self._naming_flag():
      self._file.write("".join(written).encode())
      self._file.flush()
    self.num_groups += len(written) // self._group_size

  def finish(self) -> None:
    """Gives the file its name."""
    with self._naming_flag():
      os.fsync(self._file.fileno())
      self._draft.rename(self._path)
    logging.info("wrote %d lines to %s", self.num_lines, self._path)

  @property
  def num_lines(self) -> int:
    """The number of lines that are written."""
    return self.num_groups * self._group_size

  def close(self) -> None:
    """Closes the file, complete or not."""
    with contextlib.suppress(OSError):  # which `write` has reported
      self._file.close()

  @contextlib.contextmanager
  def _naming_flag(self) -> Iterator[None]:
    """Names the flag in the error of a full disk, whose message has no file."""
    try:
      yield
    except OSError as error:
      raise UserError(
        f"--out={self._path}: cannot be written ({error.strerror})"
      ) from error

  def _complete_groups(self) -> tuple[int, int]:
    """Returns the number of complete groups, and their number of bytes."""
    self._file.seek(0)
    lines = groups_end = position = 0
    for line in self._file:
      position += len(line)
      lines += line.endswith(b"\n")
      if line.endswith(b"\n") and lines % self._group_size == 0:
        groups_end = position
    return lines // self._group_size, groups_end
