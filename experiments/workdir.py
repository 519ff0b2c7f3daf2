"""A run's directory: whose it is, and where in it things stand.

- config.json: the config, complete
- metrics.jsonl: one object a line, step, split, name: value
- timings.jsonl: what the clock said, likewise
- checkpoints/: Orbax; damaged/ holds those that could not be read
- tokenizer/, data/: of a run on text; see `data/translation.py`
- eval/SPLIT.json: metrics of an evaluation set, and by length
- eval/SPLIT.txt: its answers
- figures/: alignments, accuracy by length
- events.*: TensorBoard
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import schema
from experiments.errors import UserError
from experiments.schema import Config

CONFIG = "config.json"
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
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / CONFIG
    known = path.exists()
    if known:
      _check_same(path, raw)
    elif (workdir / "checkpoints").exists():
      raise UserError(
        f"--workdir={workdir}: holds checkpoints but no {CONFIG}; it is no"
        " whole run directory. Use another one."
      )
    else:
      _write_atomically(path, json.dumps(raw, indent=2) + "\n")
    if not os.access(workdir, os.W_OK):
      raise PermissionError(13, "Permission denied")
  except OSError as error:
    raise UserError(
      f"--workdir={workdir}: cannot be written ({error.strerror}); choose"
      " another directory"
    ) from None
  return not known


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
  (workdir / CONFIG).unlink()
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
  _write_atomically(path, json.dumps(value, indent=2) + "\n")


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


def _read_raw(path: Path) -> dict[str, Any]:
  try:
    raw = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise UserError(
      f"--workdir={path.parent}: not a run directory, it has no {path.name};"
      " train first, or give the directory that training printed"
    ) from None
  except (OSError, ValueError) as error:
    raise UserError(f"{path}: cannot be read ({error})") from None
  if not isinstance(raw, dict):
    raise UserError(f"{path}: not a config")
  return raw


def _check_same(path: Path, raw: Mapping[str, Any]) -> None:
  there = _read_raw(path)
  ours = {name: raw[name] for name in raw if name not in _MAY_DIFFER}
  theirs = {name: there[name] for name in there if name not in _MAY_DIFFER}
  lines = differences(ours, theirs)
  if lines:
    raise UserError(
      f"--workdir={path.parent}: holds a different run; use another directory."
      "\n  " + "\n  ".join(lines)
    )


def _write_atomically(path: Path, text: str) -> None:
  draft = path.with_name(f".{path.name}.{os.getpid()}")
  draft.write_text(text, encoding="utf-8")
  draft.replace(path)
