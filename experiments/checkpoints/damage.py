"""Checkpoints whose files are not what was saved: told, and set aside."""

import json
import shutil
from pathlib import Path

from absl import logging

from experiments.errors import UserError

_DAMAGED = "damaged"
NONE_LEFT = (
  "No checkpoint of the run can be read, and nothing was moved. If the files"
  " are lost, another --workdir starts over."
)


class DamagedCheckpointError(UserError):
  """A checkpoint whose files are not what was saved."""


def check_listing(folder: Path, best_metric: str, *, read_only: bool) -> None:
  """Sets aside what would keep Orbax from listing the other checkpoints.

  Args:
    folder: of the checkpoints.
    best_metric: that checkpoints with metrics are ranked by.
    read_only: whether nothing may be moved.

  Raises:
    UserError: if something would have to be moved and may not, or all of them.

  Example:
    >>> check_listing(Path("runs/none/checkpoints"), "loss", read_only=True)
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
  """Lists the checkpoints that are complete.

  Args:
    folder: of the checkpoints.

  Returns:
    Their folders, in no order.

  Example:
    >>> complete(Path("runs/none/checkpoints"))
    []
  """
  return [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]


def set_aside(checkpoint: Path) -> Path:
  """Moves a damaged checkpoint where nothing is lost and nobody trips.

  Args:
    checkpoint: its folder.

  Returns:
    Where it is now.

  Example:
    >>> set_aside(Path("runs/reverse/checkpoints/500"))  # doctest: +SKIP
    PosixPath('runs/reverse/damaged/500')
  """
  target = checkpoint.parent.parent / _DAMAGED / checkpoint.name
  while target.exists():
    target = target.with_name(target.name + "_")
  target.parent.mkdir(exist_ok=True)
  shutil.move(checkpoint, target)
  return target


def _can_be_ranked(step: Path, best_metric: str) -> bool:
  """Whether it has no metrics, or those that it should have."""
  metrics = step / "metrics" / "metrics"
  if not metrics.exists():
    return True
  try:
    found = json.loads(metrics.read_text())
  except ValueError:
    return False
  value = found.get(best_metric) if isinstance(found, dict) else None
  return isinstance(value, int | float)
