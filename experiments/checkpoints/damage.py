"""Distinguishes damaged checkpoints from other failures; moves them away."""

import contextlib
import errno
import json
import os
import textwrap
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from experiments.checkpoints.listing import complete
from experiments.errors import UserError
from experiments.run_directory import make_folder, move

_DAMAGED = "damaged"
_JAX_ERROR = jax.errors.JaxRuntimeError
# Part of Orbax's message for a state of another structure.
_OTHER_ARRAYS = "structures do not match"
_OTHER_SHAPE = "is not compatible with the stored shape"
NONE_LEFT = (
  "No checkpoint of the run can be read, and nothing was moved. If the files"
  " are lost, another --workdir starts over."
)

MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Messages of the operating system that TensorStore puts into a ValueError.
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_ACCESS = (errno.EROFS, errno.EACCES, errno.EPERM)
_FAILURE = (errno.EIO, errno.ESTALE, errno.EMFILE)
_SYSTEM_ERRORS = tuple(map(os.strerror, (*_FULL_DISK, *_NO_ACCESS, *_FAILURE)))


class DamagedCheckpointError(UserError):
  """The files of a checkpoint are not what was saved."""

  def __init__(self, checkpoint: Path, reason: str):
    super().__init__(f"checkpoint {checkpoint} {reason}")
    self.step = int(checkpoint.name)


class _DigestError(ValueError):
  """A restored array differs from the one that was saved."""


def check_digests(found: Mapping[str, int], saved: Any) -> None:
  """Raises an error that `agreement` reports as damage if a digest differs."""
  for name, digest in found.items():
    if not isinstance(saved, dict) or saved.get(name) != digest:
      raise _DigestError(f"{name} is not what was saved")


@contextlib.contextmanager
def agreement(checkpoint: Path) -> Iterator[None]:
  """If one process cannot read its part, raises the same error in all."""
  failure: Exception | None = None
  try:
    yield
  except Exception as error:  # Orbax raises errors of all its layers.
    if isinstance(error, _JAX_ERROR) and jax.process_count() > 1:
      raise
    failure = _explain(checkpoint, error)
  # 0: success, 1: damage, 2: another failure.
  severity = 0 if failure is None else 2
  if isinstance(failure, DamagedCheckpointError):
    severity = 1
  if jax.process_count() > 1:
    severities = multihost_utils.process_allgather(np.int32(severity)).tolist()
    if (worst := max(severities)) > severity:
      reason = f"cannot be read by process {severities.index(worst)}."
      failure = UserError(f"checkpoint {checkpoint} {reason}")
      if worst == 1:
        failure = DamagedCheckpointError(checkpoint, reason)
  if failure:
    try:
      raise failure
    finally:
      del failure  # Its traceback would keep Orbax's open files alive.


def _explain(checkpoint: Path, error: Exception) -> Exception:
  """Returns the error to raise in place of one that a restore raised."""
  # Orbax puts the text of a bound method behind these words.
  reason = str(error).partition(" See full TensorStore details:")[0].strip()
  reason = textwrap.shorten(
    reason.split("\n")[0].rstrip("."), 200, placeholder=" [...]"
  )
  is_damage = isinstance(error, (*MISSING, _DigestError))
  explained: UserError
  if _OTHER_ARRAYS in str(error):
    explained = UserError(
      f"checkpoint {checkpoint} holds other arrays than the model of"
      f" config.json ({reason}); undo changes of this file, or use the version"
      " that wrote the checkpoint"
    )
  elif not is_damage and (
    isinstance(error, (MemoryError, _JAX_ERROR)) or system_error(error)
  ):
    explained = UserError(f"checkpoint {checkpoint}: cannot be read ({reason})")
  elif _OTHER_SHAPE in reason:
    # Damage of the recorded shape is possible too, so older ones are tried.
    explained = DamagedCheckpointError(
      checkpoint,
      "does not fit the model of config.json"
      f" ({reason.partition('. ')[0]}); undo changes of this file.",
    )
  elif is_damage or _is_of_orbax(error):
    explained = DamagedCheckpointError(
      checkpoint, f"is damaged ({type(error).__name__}: {reason})."
    )
  else:
    return error  # a bug
  explained.__cause__ = error
  return explained


def _is_of_orbax(error: Exception) -> bool:
  """Whether Orbax raised an error; it has no exception type for damage."""
  frames = traceback.walk_tb(error.__traceback__)
  modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
  return any(name.startswith("orbax.") for name in modules)


def check_listing(folder: Path, best_metric: str, *, read_only: bool) -> None:
  """Moves checkpoints away whose damaged metrics stop Orbax's listing."""
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
      "checkpoint %s is damaged (its metrics cannot be read). It was moved to"
      " %s.",
      step,
      set_aside(step),
    )


def set_aside(checkpoint: Path) -> Path:
  """Moves a checkpoint to the run's folder `damaged` and returns its path."""
  target = checkpoint.parent.parent / _DAMAGED / checkpoint.name
  while target.exists():
    target = target.with_name(target.name + "_")
  make_folder(target.parent)
  move(checkpoint, target)
  return target


def _can_be_ranked(step: Path, best_metric: str) -> bool:
  """Whether a checkpoint has no metrics, or the one that ranks checkpoints."""
  try:
    metrics = json.loads((step / "metrics" / "metrics").read_text())
    return isinstance(metrics[best_metric], int | float)
  except FileNotFoundError:
    return True
  except (ValueError, LookupError, TypeError):
    return False


def system_error(error: BaseException) -> str | None:
  """Returns the operating system's message; None for damage and bugs."""
  for text in _SYSTEM_ERRORS:
    if text in str(error):
      return text
  # A missing file is damage.
  if isinstance(error, OSError) and not isinstance(error, MISSING):
    return str(error).strip().split("\n")[0][:200]
  cause = error.__cause__ or error.__context__
  return system_error(cause) if cause else None
