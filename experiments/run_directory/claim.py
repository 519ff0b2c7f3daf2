"""Whose directory it is: that of one config."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.config import Config, parse
from experiments.errors import UserError
from experiments.run_directory.diff import differences
from experiments.run_directory.files import read_json, write_json, writing
from experiments.run_directory.lock import LOCK
from experiments.run_directory.versions import VERSIONS

CONFIG = "config.json"
# Where a run's arrays live is no part of what it computes, nor how long its
# processes wait for each other.
_MAY_DIFFER = ("mesh", "train.stall_seconds")


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
  with writing(workdir):
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
      write_json(path, raw)
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
  there = read_json(workdir / CONFIG)
  lines = differences(raw, there, may_differ=_MAY_DIFFER)
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
  for name in (CONFIG, VERSIONS, LOCK):
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
  return parse(read_json(workdir / CONFIG))
