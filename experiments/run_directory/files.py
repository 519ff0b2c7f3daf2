"""Files of a run: written whole or not at all, read with a clear message."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.errors import UserError


def write_text(path: Path, text: str) -> None:
  """Writes a file whole or not at all.

  Args:
    path: the file.
    text: its content.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   write_text(Path(folder) / "note", "done")
    ...   (Path(folder) / "note").read_text()
    'done'
  """
  draft = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    with draft.open("w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    draft.replace(path)
  except OSError as error:  # which need not say of what
    draft.unlink(missing_ok=True)
    raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, value: Any) -> None:
  """Writes a JSON file whole or not at all, with its folder.

  Args:
    path: the file.
    value: of types that JSON has.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   write_json(Path(folder) / "eval" / "test.json", {"step": 10})
    ...   json.loads((Path(folder) / "eval" / "test.json").read_text())
    {'step': 10}
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
  """Reads an object from a JSON file of a run.

  Args:
    path: the file.

  Returns:
    It, as dictionaries.

  Raises:
    UserError: if it is not there, cannot be read, or holds something else.

  Example:
    >>> read_json(Path("nowhere/config.json"))
    Traceback (most recent call last):
    experiments.errors.UserError: --workdir=nowhere: not a run directory...
  """
  try:
    raw = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise UserError(
      f"--workdir={path.parent}: not a run directory, it has no {path.name};"
      " train first, or give the directory that training printed"
    ) from None
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path}: cannot be read ({error})") from None
  if not isinstance(raw, dict):
    raise UserError(f"{path}: not a config")
  return raw


@contextlib.contextmanager
def writing(workdir: Path) -> Iterator[None]:
  """Says of a directory that cannot be written that it cannot.

  Args:
    workdir: the run's directory.

  Yields:
    Nothing.

  Raises:
    UserError: in place of what the system raises.

  Example:
    >>> with writing(Path("run")):
    ...   raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    experiments.errors.UserError: --workdir=run: cannot be written (No space...
  """
  try:
    yield
  except OSError as error:
    raise UserError(
      f"--workdir={workdir}: cannot be written ({error.strerror}); make room,"
      " or choose another directory"
    ) from None
