"""Reads and writes the files of a run."""

import contextlib
import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.errors import NoRunError, UserError
from experiments.run_directory.remote import (
  check_reachable,
  client_errors,
  is_remote,
  make_folder,
)

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def write_text(path: Path, text: str) -> None:
  """Writes a text file atomically."""
  write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
  """Writes a file atomically."""
  if is_remote(path):
    with client_errors(path):
      path.write_bytes(content)
    return
  draft = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    with draft.open("wb") as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    draft.replace(path)
  except OSError as error:  # whose message may lack the path
    with contextlib.suppress(OSError):
      draft.unlink()
    raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, value: Any) -> None:
  """Writes a JSON file atomically, in a directory that may not exist yet."""
  make_folder(path.parent)
  write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
  """Reads a JSON object of a run; raises UserError if there is none."""
  try:
    raw = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise NoRunError(
      f"--workdir={path.parent}: not a run directory, it has no {path.name};"
      " train first, or use the directory that training printed"
    ) from None
  except NotADirectoryError:
    raise _not_a_folder(path.parent) from None
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path}: cannot be read ({error})") from None
  if not isinstance(raw, dict):
    raise UserError(f"{path}: not a JSON object")
  return raw


@contextlib.contextmanager
def writing(workdir: Path) -> Iterator[None]:
  """Replaces an OSError by a UserError that names the run directory."""
  try:
    yield
  except OSError as error:
    if not is_remote(workdir) and os.path.isfile(workdir):
      raise _not_a_folder(workdir) from None
    advice = "free some space, or " if error.errno in _FULL_DISK else ""
    raise UserError(
      f"--workdir={workdir}: cannot be written ({error.strerror or error});"
      f" {advice}use another directory"
    ) from None


@contextlib.contextmanager
def naming_full_disk(folder: Path) -> Iterator[None]:
  """Names a folder whose disk is full, which the error of a write does not."""
  try:
    yield
  except OSError as error:
    if error.errno not in _FULL_DISK:
      raise
    raise UserError(
      f"{folder}: {error.strerror}; free some space, or use another --workdir"
    ) from None


def check_results(workdir: Path) -> None:
  """Raises UserError if results of an evaluation cannot be written."""
  folder = workdir / "eval"
  with writing(workdir):
    make_folder(folder)
    if not is_remote(workdir):
      tempfile.TemporaryFile(dir=folder).close()


def check_writable(path: Path, *, flag: str) -> None:
  """Makes the folder of a file; raises UserError if it cannot be written."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
      path.open("ab").close()
    if path.is_file() or not path.exists():  # else a pipe or a device
      tempfile.TemporaryFile(dir=path.parent).close()
  except OSError as error:
    raise UserError(
      f"--{flag}={path}: cannot be written ({error.strerror}); give another"
      " name"
    ) from None


def _not_a_folder(workdir: Path) -> UserError:
  return UserError(f"--workdir={workdir}: is a file, not a directory")


def check_access(workdir: Path) -> None:
  """Raises UserError for an unreachable bucket, or a link to a file outside."""
  if is_remote(workdir):
    check_reachable(workdir)
    return
  inside = workdir.resolve()
  for path in workdir.rglob("*"):
    if path.is_symlink() and not path.resolve().is_relative_to(inside):
      raise UserError(
        f"{path}: a symbolic link to a file outside the run directory; replace"
        " it by a copy of the file, or remove it"
      )
