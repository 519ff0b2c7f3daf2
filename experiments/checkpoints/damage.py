"""Damaged checkpoints: their files are not what was saved."""

import errno
import json
import os
import shutil
from pathlib import Path

from absl import logging

from experiments.errors import UserError

_DAMAGED = "damaged"
NONE_LEFT = (
  "No checkpoint of the run can be read, and nothing was moved. If the files"
  " are lost, another --workdir starts over."
)

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Texts of the system's errors, which TensorStore puts into a ValueError.
_SYSTEM_ERRORS = tuple(
  os.strerror(number)
  for number in (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ESTALE,
    errno.EMFILE,
    errno.EFBIG,
  )
)


class DamagedCheckpointError(UserError):
  """The files of a checkpoint are not what was saved."""


def check_listing(folder: Path, best_metric: str, *, read_only: bool) -> None:
  """Moves checkpoints away that keep Orbax from listing the others.

  Raises UserError if `read_only` forbids that, or if no other is left.
  """
  steps = complete(folder)
  damaged = [step for step in steps if not _can_be_ranked(step, best_metric)]
  if damaged and read_only:
    raise UserError(
      f"checkpoint {damaged[0]} is damaged (its metrics cannot be read); move"
      f" it out of {folder} to use the others"
    )
  if damaged and len(damaged) == len(steps):
    raise UserError(f"checkpoint {damaged[0]} is damaged. {NONE_LEFT}")
  for step in damaged:
    logging.warning(
      "checkpoint %s is damaged (its metrics cannot be read). It is kept as"
      " %s.",
      step,
      set_aside(step),
    )


def complete(folder: Path) -> list[Path]:
  """Returns the folders of the complete checkpoints, in no order."""
  return [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]


def set_aside(checkpoint: Path) -> Path:
  """Moves a checkpoint to the run's folder `damaged` and returns its path."""
  target = checkpoint.parent.parent / _DAMAGED / checkpoint.name
  while target.exists():
    target = target.with_name(target.name + "_")
  target.parent.mkdir(exist_ok=True)
  shutil.move(checkpoint, target)
  return target


def _can_be_ranked(step: Path, best_metric: str) -> bool:
  """Whether it has no metrics, or the one that checkpoints are ranked by."""
  metrics = step / "metrics" / "metrics"
  if not metrics.exists():
    return True
  try:
    found = json.loads(metrics.read_text())
  except ValueError:
    return False
  value = found.get(best_metric) if isinstance(found, dict) else None
  return isinstance(value, int | float)


def system_error(error: BaseException) -> str | None:
  """Returns the system's words for a file error that is no missing file."""
  for text in _SYSTEM_ERRORS:
    if text in str(error):
      return text
  if isinstance(error, OSError) and not isinstance(error, MISSING):
    return str(error).strip().split("\n")[0][:200]
  cause = error.__cause__ or error.__context__
  return system_error(cause) if cause else None
