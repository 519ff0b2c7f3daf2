"""A run's directory: whose it is, and where in it things stand.

- config.json: the config, complete
- metrics.jsonl: one object a line, step, split, name: value
- timings.jsonl: what the clock said, likewise
- versions.json: of what the run began with
- .lock: held by the process that trains
- checkpoints/: Orbax; damaged/ holds those that could not be read
- tokenizer/, data/: of a run on text; see `data/translation.py`
- eval/SPLIT.json: metrics of an evaluation set, and by length
- eval/SPLIT.txt: its answers
- figures/: alignments, accuracy by length
- events.*: TensorBoard
"""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from experiments import schema
from experiments.errors import UserError
from experiments.schema import Config

CONFIG, VERSIONS, _LOCK = "config.json", "versions.json", ".lock"
# What can change a run's numbers.
_MATTER = ("jax", "jaxlib", "flax", "optax", "numpy", "grain", "sentencepiece")
# Where a run's arrays live is no part of what it computes.
_MAY_DIFFER = ("mesh",)


def claim(workdir: Path, raw: Mapping[str, Any]) -> bool:
  """Makes a directory the directory of a run, or checks that it is.

  Args:
    workdir: the directory, which may not exist yet.
    raw: the run's config as nested dictionaries.

  Returns:
    Whether it was no run's directory before.

  Raises:
    UserError: if the directory cannot be written, or holds the run of another
      config; the fields that differ are named.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   claimed = claim(Path(folder) / "run", {"seed": 0})
    ...   claim(Path(folder) / "run", {"seed": 1})
    Traceback (most recent call last):
    experiments.errors.UserError: ...config.seed: 0 there, 1 here
  """
  with _writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / CONFIG
    known = path.exists()
    if known:
      check_same(workdir, raw)
    elif (workdir / "checkpoints").exists():
      raise UserError(
        f"--workdir={workdir}: holds checkpoints but no {CONFIG}; it is no"
        " whole run directory. Use another one."
      )
    else:
      write_text(path, json.dumps(raw, indent=2) + "\n")
    if not os.access(workdir, os.W_OK):
      raise PermissionError(13, "Permission denied")
  return not known


def check_same(workdir: Path, raw: Mapping[str, Any]) -> None:
  """Checks that a directory holds the run of a config.

  Args:
    workdir: the run's directory.
    raw: the config as nested dictionaries.

  Raises:
    UserError: if it holds another; the fields that differ are named.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   claimed = claim(Path(folder), {"seed": 0})
    ...   check_same(Path(folder), {"seed": 0})
  """
  there = _read_raw(workdir / CONFIG)
  ours = {name: raw[name] for name in raw if name not in _MAY_DIFFER}
  theirs = {name: there[name] for name in there if name not in _MAY_DIFFER}
  lines = differences(ours, theirs)
  if lines:
    raise UserError(
      f"--workdir={workdir}: holds a different run; use another directory."
      "\n  " + "\n  ".join(lines)
    )


def release(workdir: Path) -> None:
  """Gives a directory up in which no run has begun, for another config.

  Args:
    workdir: the directory, just claimed.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   claimed = claim(Path(folder) / "run", {"seed": 0})
    ...   release(Path(folder) / "run")
    ...   claim(Path(folder) / "run", {"seed": 1})
    True
  """
  for name in (CONFIG, VERSIONS, _LOCK):
    (workdir / name).unlink(missing_ok=True)
  if not any(workdir.iterdir()):
    workdir.rmdir()


def read_config(workdir: Path) -> Config:
  """Reads the config of a run.

  Args:
    workdir: the run's directory.

  Returns:
    The typed config.

  Raises:
    UserError: if there is no run, or its config does not fit this version.

  Example:
    >>> import tempfile
    >>> from configs import base
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   claimed = claim(Path(folder), base.get_config().to_dict())
    ...   read_config(Path(folder)).data.name
    'reverse'
  """
  return schema.parse(_read_raw(workdir / CONFIG))


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


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
  """Keeps a directory from being trained in twice at a time.

  The lock goes with the process, however that ends.

  Args:
    workdir: the directory, which may not exist yet.

  Yields:
    Nothing.

  Raises:
    UserError: if another process holds it, which is named; or if the directory
      cannot be written.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, locked(Path(folder)):
    ...   with locked(Path(folder)):
    ...     pass
    Traceback (most recent call last):
    experiments.errors.UserError: ...another run is at work in it: process ...
  """
  with _writing(workdir):
    workdir.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    file = os.fdopen(
      os.open(workdir / _LOCK, flags, 0o666), "r+", encoding="utf-8"
    )
  with file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      file.seek(0)
      raise UserError(
        f"--workdir={workdir}: another run is at work in it: {file.read()};"
        " wait for its end, stop it, or use another directory"
      ) from None
    except OSError as error:
      logging.warning(
        "%s cannot be locked (%s): make sure that no other run uses it",
        workdir,
        error.strerror,
      )
    with _writing(workdir):
      file.truncate(0)
      file.write(f"process {os.getpid()} on {socket.gethostname()}")
      file.flush()
    yield


def note_versions(workdir: Path) -> None:
  """Writes down what a run begins with, or warns if that was something else.

  Args:
    workdir: the run's directory.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   note_versions(Path(folder))
    ...   "jax" in json.loads((Path(folder) / VERSIONS).read_text())
    True
  """
  path = workdir / VERSIONS
  ours = {"python": platform.python_version()}
  ours |= {name: importlib.metadata.version(name) for name in _MATTER}
  if not path.exists():
    write_json(path, ours)
    return
  try:
    theirs = _read_raw(path)
  except UserError as error:  # a note, which no run depends on
    logging.warning("%s; the versions of its beginning are unknown", error)
    return
  if lines := differences(ours, theirs, "version"):
    logging.warning(
      "the run began with other versions, results may differ in last digits:"
      " %s",
      "; ".join(line.removeprefix("version.") for line in lines),
    )


def check_links(workdir: Path) -> None:
  """Checks that nothing in a directory leads out of it.

  Args:
    workdir: the run's directory, perhaps somebody else's.

  Raises:
    UserError: naming a link that does.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   (Path(folder) / "eval").symlink_to("/tmp")
    ...   check_links(Path(folder))
    Traceback (most recent call last):
    experiments.errors.UserError: ...eval: a link that leads out of the run...
  """
  inside = workdir.resolve()
  for folder, folders, files in os.walk(workdir):
    for path in (Path(folder, name) for name in (*folders, *files)):
      if path.is_symlink() and not path.resolve().is_relative_to(inside):
        raise UserError(
          f"{path}: a link that leads out of the run's directory; put what it"
          " leads to in its place, or remove it"
        )


def differences(
  ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "config"
) -> list[str]:
  """Lists the fields in which two configs differ.

  Args:
    ours: nested dictionaries.
    theirs: likewise.
    path: the name of the whole.

  Returns:
    One line a field: its name, their value and ours.

  Example:
    >>> differences({"a": {"b": 1}}, {"a": {"b": 2}})
    ['config.a.b: 2 there, 1 here']
  """
  lines = []
  for name in dict.fromkeys([*ours, *theirs]):
    mine, other = ours.get(name, "missing"), theirs.get(name, "missing")
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
      lines += differences(mine, other, f"{path}.{name}")
    elif mine != other:
      lines.append(f"{path}.{name}: {other!r} there, {mine!r} here")
  return lines


@contextlib.contextmanager
def _writing(workdir: Path) -> Iterator[None]:
  """Says of a directory that cannot be written that it cannot."""
  try:
    yield
  except OSError as error:
    raise UserError(
      f"--workdir={workdir}: cannot be written ({error.strerror}); make room,"
      " or choose another directory"
    ) from None


def _read_raw(path: Path) -> dict[str, Any]:
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
