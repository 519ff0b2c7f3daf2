"""Restores checkpoints, and tells damaged ones from other failures."""

import contextlib
import functools
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

from experiments.checkpoints.content import ITEMS, arrays, digests_of
from experiments.checkpoints.damage import (
  MISSING,
  NONE_LEFT,
  DamagedCheckpointError,
  set_aside,
  system_error,
)
from experiments.distributed.multihost import first_process_only
from experiments.errors import UserError
from experiments.optimization.step import TrainState

_OF_JAX = jax.errors.JaxRuntimeError
# Orbax's words for a state of another structure.
_OTHER_ARRAYS = "structures do not match"


def restore_last(
  manager: ocp.CheckpointManager, like: TrainState
) -> tuple[TrainState, Mapping[str, Any]] | None:
  """Restores the last intact checkpoint and moves damaged ones away.

  As `restore`; None if there is no checkpoint yet, and UserError if none of
  them can be read.
  """
  steps = sorted(manager.all_steps(), reverse=True)
  damaged: list[tuple[int, UserError]] = []
  for step in steps:
    try:
      restored = restore(manager, step, like)
    except DamagedCheckpointError as error:
      damaged.append((step, error))
      continue
    # Nothing is moved before an older checkpoint has been restored.
    if damaged:
      first_process_only(functools.partial(_keep, manager, damaged))
      manager.reload()
    return restored
  if damaged:
    raise UserError(f"{damaged[0][1]} {NONE_LEFT}") from damaged[0][1]
  return None


def _keep(manager: ocp.CheckpointManager, damaged) -> None:
  for step, error in damaged:
    kept = set_aside(Path(manager.directory) / str(step))
    logging.warning("%s It is kept as %s.", error, kept)
    logging.vlog(1, "%s", "".join(traceback.format_exception(error)))


def restore(
  manager: ocp.CheckpointManager, step: int, like: TrainState
) -> tuple[TrainState, Mapping[str, Any]]:
  """Restores the state and the position of the data iterator of a checkpoint.

  `like` is a state of the same shapes, real or abstract, with the shardings to
  restore to. DamagedCheckpointError if the files are not what was saved,
  UserError if they cannot be read for another reason.
  """
  folder = Path(manager.directory) / str(step)
  with agreement(folder):
    restored = _read(manager, step, like)
  with agreement(folder):
    found = digests_of(restored["state"], restored["batches"])
    check_digests(found, restored["digests"])
  state = restored["state"]
  rng = jax.random.wrap_key_data(state["rng"])
  state = {"average": None, **state, "rng": rng}
  return TrainState(**state), restored["batches"]


def _read(manager: ocp.CheckpointManager, step: int, like: TrainState):
  """Reads this process's part without waiting for the other processes.

  So a process that cannot read its part does not block the others.
  """
  args = ocp.args.Composite(
    state=ocp.args.StandardRestore(arrays(like)),
    batches=ocp.args.JsonRestore(),
    digests=ocp.args.JsonRestore(),
  )
  if jax.process_count() == 1:
    return manager.restore(step, args=args)
  with ocp.CheckpointManager(
    manager.directory, options=reader_options(), item_names=ITEMS
  ) as reader:
    return reader.restore(step, args=args)


def reader_options() -> ocp.CheckpointManagerOptions:
  """Options of a manager that reads without waiting for other processes."""
  options = ocp.CheckpointManagerOptions(read_only=True)
  if jax.process_count() > 1:
    index = jax.process_index()
    options.multiprocessing_options = ocp.options.MultiprocessingOptions(
      primary_host=index,
      active_processes={index},
      barrier_sync_key_prefix=f"process_{index}",
    )
  return options


class _DigestError(ValueError):
  """A restored array differs from the one that was saved."""


def check_digests(found: Mapping[str, int], saved: Any) -> None:
  """Raises an error that `agreement` calls damage unless digests are equal."""
  for name, digest in found.items():
    if not isinstance(saved, dict) or saved.get(name) != digest:
      raise _DigestError(f"{name} is not what was saved")


@contextlib.contextmanager
def agreement(folder: Path) -> Iterator[None]:
  """Makes all processes agree on whether a checkpoint can be read.

  Raises:
    DamagedCheckpointError: in all processes, if it is damaged for one.
    UserError: in all processes, if one cannot read it.
  """
  failure: Exception | None = None
  try:
    yield
  except Exception as error:  # Orbax lets errors of all its layers through.
    if isinstance(error, _OF_JAX) and jax.process_count() > 1:
      raise
    failure = _explain(folder, error)
  severity = 0 if failure is None else 2
  if isinstance(failure, DamagedCheckpointError):
    severity = 1
  if jax.process_count() > 1:
    all_found = multihost_utils.process_allgather(np.int32(severity)).tolist()
    if (worst := max(all_found)) > severity:
      kind = DamagedCheckpointError if worst == 1 else UserError
      process = all_found.index(worst)
      failure = kind(
        f"checkpoint {folder} cannot be read by process {process}."
      )
  if failure:
    try:
      raise failure
    finally:
      del failure  # its traceback would keep Orbax's open files alive


def _explain(folder: Path, error: Exception) -> Exception:
  """Returns the error to raise for one that a checkpoint's restoring raised."""
  reason = str(error).strip().split("\n")[0][:200]
  explained: UserError
  if _is_damage(error):
    explained = DamagedCheckpointError(
      f"checkpoint {folder} is damaged ({type(error).__name__}: {reason})."
    )
  elif _OTHER_ARRAYS in str(error):
    explained = UserError(
      f"checkpoint {folder} holds other arrays than this version of the model"
      f" ({reason}); use the version that wrote it"
    )
  elif isinstance(error, (MemoryError, _OF_JAX)) or system_error(error):
    explained = UserError(f"checkpoint {folder}: cannot be read ({reason})")
  else:
    return error  # a bug
  explained.__cause__ = error
  return explained


def _is_damage(error: Exception) -> bool:
  """Whether files are missing or cut, or their content is not what was saved.

  Orbax has no exception for files that it cannot decode; whatever its own
  modules raise counts as that.
  """
  if isinstance(error, (*MISSING, _DigestError)):
    return True
  if isinstance(error, (MemoryError, _OF_JAX)) or system_error(error):
    return False
  frames = traceback.walk_tb(error.__traceback__)
  modules = [frame.f_globals.get("__name__", "") for frame, _ in frames]
  in_orbax = any(name.startswith("orbax.") for name in modules)
  return in_orbax and _OTHER_ARRAYS not in str(error)
