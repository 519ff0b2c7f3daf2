"""Binds a run directory to one config."""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from absl import logging

from experiments.config import Config, parse
from experiments.config.parse import changeable_fields, parse_stored
from experiments.config.version import migrated
from experiments.errors import UserError
from experiments.run_directory.fields import MISSING, differences, set_field
from experiments.run_directory.files import read_json, write_json, writing
from experiments.run_directory.lock import LOCK
from experiments.run_directory.remote import is_remote, make_folder
from experiments.run_directory.versions import VERSIONS

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"  # a folder
PARAMETERS = "parameters.safetensors"  # of an export
_STEPS = (
  "; it can only be raised, with config.optimizer.schedule 'constant' or"
  " 'inverse_sqrt'"
)


def claim(workdir: Path, raw: Mapping[str, Any]) -> bool:
  """Writes config.json, or updates its changeable fields; True if it is new."""
  path = workdir / CONFIG
  with writing(workdir):
    make_folder(workdir)
    is_new = not path.exists()
    if not is_new:
      _update(path, check_same(workdir, raw))
    elif (workdir / CHECKPOINTS).exists():
      raise UserError(
        f"--workdir={workdir}: has checkpoints but no {CONFIG}, so it is not a"
        " complete run directory; use another one"
      )
    else:
      write_json(path, parse(raw).model_dump())
    if not is_remote(workdir) and not os.access(workdir, os.W_OK):
      raise PermissionError(errno.EACCES, "Permission denied")
  return is_new


def check_no_export(workdir: Path) -> None:
  """Raises UserError if a run directory is an export."""
  if (workdir / PARAMETERS).exists():
    raise UserError(
      f"--workdir={workdir}: is an export, which has no training state; use"
      f" another one, with --config.train.init_from={workdir} to start from"
      " its parameters"
    )


def effective_config(workdir: Path, raw: Mapping[str, Any]) -> Config:
  """The config, where fields newer than the run keep its original behaviour."""
  config = parse(raw)
  if (workdir / CONFIG).exists():
    stored = read_json(workdir / CONFIG)
    with _naming(workdir / CONFIG):
      current = migrated(stored)
    ours = config.model_dump()
    for field, (old, known) in differences(current, stored).items():
      if known == MISSING and field != "version":
        set_field(ours, field, old)
    config = parse(ours)
  return config


def check_same(
  workdir: Path, raw: Mapping[str, Any], *, given: Path | None = None
) -> dict[str, Any]:
  """The changeable fields that differ; raises UserError if others differ.

  `given` is the user's --workdir, if it is not the run directory.
  """
  ours, theirs = effective_config(workdir, raw), read_config(workdir)
  changeable = changeable_fields()
  longer = ours.train.steps > theirs.train.steps
  if longer and not ours.optimizer.depends_on_steps:
    changeable.add("train.steps")
  changed, other = {}, []
  for field, (new, old) in differences(
    ours.model_dump(), theirs.model_dump()
  ).items():
    if field in changeable or field.partition(".")[0] in changeable:
      changed[field] = new
    else:
      hint = _STEPS if field == "train.steps" else ""
      other.append(f"config.{field}: stored {old!r}, given {new!r}{hint}")
  if other:
    raise UserError(
      f"--workdir={workdir}: has a run of another config; use another"
      f" directory, such as --workdir={given or workdir}-2\n  "
      + "\n  ".join(other)
    )
  return changed


def _update(path: Path, changed: Mapping[str, Any]) -> None:
  """Updates fields of config.json without changing its schema version."""
  if not changed:
    return
  stored = read_json(path)
  for field, value in changed.items():
    set_field(stored, field, value)
  write_json(path, stored)
  values = (f"config.{field}={value}" for field, value in changed.items())
  logging.info("%s is updated: %s", path, ", ".join(values))


def release(workdir: Path) -> None:
  """Removes the files that `claim` wrote, for a run that has not started."""
  for name in (CONFIG, VERSIONS, LOCK):
    (workdir / name).unlink(missing_ok=True)
  if not is_remote(workdir) and not any(workdir.iterdir()):
    workdir.rmdir()


def read_config(workdir: Path) -> Config:
  """The config of a run, of this schema version or an older one."""
  path = workdir / CONFIG
  raw = read_json(path)
  with _naming(path):
    return parse_stored(raw)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
  """Names the file in the error of a config that is stored in it."""
  try:
    yield
  except UserError as error:
    raise UserError(f"{path}: {error}") from error
