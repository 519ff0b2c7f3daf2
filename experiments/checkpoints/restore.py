"""Restoring: what every process finds whole, or what is wrong with it."""

import contextlib
import functools
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
  NONE_LEFT,
  DamagedCheckpointError,
  set_aside,
)
from experiments.distributed.multihost import first_process_only
from experiments.errors import UserError
from experiments.optimization.step import TrainState

_OF_JAX = jax.errors.JaxRuntimeError


def restore_last(
  manager: ocp.CheckpointManager, like: TrainState
) -> tuple[TrainState, Mapping[str, Any]] | None:
  """Restores the last readable checkpoint and sets damaged ones aside.

  Args:
    manager: from `opened`.
    like: a state of the same shapes (real or abstract), with the shardings to
      restore to.

  Returns:
    The state and the position of the data iterator, or None where there is
    no checkpoint yet.

  Raises:
    UserError: if there are checkpoints and none can be read.

  Example:
    >>> restored = restore_last(manager, runs.start(run))  # doctest: +SKIP
  """
  steps = sorted(manager.all_steps(), reverse=True)
  damaged: list[tuple[int, UserError]] = []
  for step in steps:
    try:
      restored = restore(manager, step, like)
    except DamagedCheckpointError as error:
      damaged.append((step, error))
      continue
    # Only now, with an older one in hand, is anything moved.
    if damaged:
      first_process_only(functools.partial(_keep, manager, damaged))
      manager.reload()
    return restored
  if damaged:
    raise UserError(f"{damaged[0][1]} {NONE_LEFT}")
  return None


def _keep(manager: ocp.CheckpointManager, damaged) -> None:
  for step, reason in damaged:
    kept = set_aside(Path(manager.directory) / str(step))
    logging.warning("%s It is kept as %s.", reason, kept)


def restore(
  manager: ocp.CheckpointManager, step: int, like: TrainState
) -> tuple[TrainState, Mapping[str, Any]]:
  """Restores one checkpoint.

  Args:
    manager: from `opened`.
    step: which one.
    like: as for `restore_last`.

  Returns:
    The state and the position of the data iterator.

  Raises:
    UserError: if it cannot be read, with the reason.

  Example:
    >>> like = runs.start(run)  # doctest: +SKIP
    >>> state, position = restore(manager, 500, like)  # doctest: +SKIP
  """
  folder = Path(manager.directory) / str(step)
  with agreement(folder):
    restored = _read(manager, step, like)
  with agreement(folder):
    _check_digests(restored)
  state = restored["state"]
  rng = jax.random.wrap_key_data(state["rng"])
  state = {"average": None, **state, "rng": rng}
  return TrainState(**state), restored["batches"]


def _read(manager: ocp.CheckpointManager, step: int, like: TrainState):
  """Reads this process's share, without waiting for the others.

  They might wait for it in vain, where it alone cannot read.
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


def _check_digests(restored) -> None:
  found = digests_of(restored["state"], restored["batches"])
  saved = restored["digests"]
  for name in found | saved:
    if found.get(name) != saved.get(name):
      raise ValueError(f"{name} is not what was saved")


@contextlib.contextmanager
def agreement(folder: Path) -> Iterator[None]:
  """Has all processes take a checkpoint for what one of them finds it to be.

  Raises:
    UserError: naming what is wrong, in all of them.
  """
  found: UserError | None = None
  try:
    yield
  except Exception as error:  # Orbax raises whatever its layers raise.
    if isinstance(error, _OF_JAX) and jax.process_count() > 1:
      raise
    found = _verdict(folder, error)
    found.__cause__ = error
  kinds = [None, DamagedCheckpointError, UserError]
  worst = kinds.index(type(found) if found else None)
  if jax.process_count() > 1:
    worsts = multihost_utils.process_allgather(np.int32(worst)).tolist()
    worst = max(worsts)
    if worst and not (found and worst == kinds.index(type(found))):
      found = kinds[worst](
        f"checkpoint {folder} cannot be read by process {worsts.index(worst)}."
      )
  if found:
    try:
      raise found
    finally:
      del found  # or it keeps what Orbax left half done


def _verdict(folder: Path, error: Exception) -> UserError:
  """What an error says of the checkpoint it came from."""
  reason = str(error).strip().split("\n")[0][:200]
  missing = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
  outside = isinstance(error, (OSError, MemoryError, _OF_JAX))
  if outside and not isinstance(error, missing):
    return UserError(f"checkpoint {folder}: cannot be read ({reason})")
  if "structures do not match" in str(error):
    return UserError(
      f"checkpoint {folder} holds other arrays than this version of the model"
      f" ({reason}); use the version that wrote it"
    )
  return DamagedCheckpointError(
    f"checkpoint {folder} is damaged ({type(error).__name__}: {reason})."
  )
