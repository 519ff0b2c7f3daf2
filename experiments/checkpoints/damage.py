"""Checkpoints whose files are not what was saved: told, and set aside."""

import json
import shutil
from pathlib import Path

from absl import logging

from experiments.errors import UserError

DAMAGED = "damaged"
NONE_LEFT = (
  "No checkpoint of the run can be read, and nothing was moved. If the files"
  " are lost, another --workdir starts over."
)


class DamagedCheckpointError(UserError):
  """A checkpoint whose files are not what was saved."""


def check_listing(folder: Path, *, read_only: bool) -> None:
  """Deals with checkpoints that would keep Orbax from listing the others."""
  steps = complete(folder)
  damaged = [step for step in steps if not _has_readable_metrics(step)]
  if damaged and read_only:
    raise UserError(
      f"checkpoint {damaged[0]} is damaged (its metrics are no JSON); move it"
      f" out of {folder} to use the others"
    )
  if damaged and len(damaged) == len(steps):
    raise UserError(f"checkpoint {damaged[0]} is damaged. {NONE_LEFT}")
  for step in damaged:
    logging.warning(
      "checkpoint %s is damaged (its metrics are no JSON). It is kept as %s.",
      step,
      set_aside(step),
    )


def complete(folder: Path) -> list[Path]:
  """The checkpoints that are complete."""
  return [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]


def set_aside(checkpoint: Path) -> Path:
  """Moves a damaged checkpoint where nothing is lost and nobody trips."""
  target = checkpoint.parent.parent / DAMAGED / checkpoint.name
  while target.exists():
    target = target.with_name(target.name + "_")
  target.parent.mkdir(exist_ok=True)
  shutil.move(checkpoint, target)
  return target


def _has_readable_metrics(step: Path) -> bool:
  metrics = step / "metrics" / "metrics"
  try:
    if metrics.exists():
      json.loads(metrics.read_text())
  except ValueError:
    return False
  return True
