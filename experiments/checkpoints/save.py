"""Saving: asynchronous, and a failure told with what to do about it."""

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.checkpoints.content import arrays, digests_of
from experiments.checkpoints.damage import complete
from experiments.errors import UserError
from experiments.optimization.step import TrainState


class UnsavedCheckpointError(UserError):
  """A checkpoint that could not be written; earlier ones are as they were."""

  code = 1


def save(
  manager: ocp.CheckpointManager,
  state: TrainState,
  batches: Mapping[str, Any],
  metrics: Mapping[str, float] | None,
) -> None:
  """Saves a checkpoint, unless this step is saved already.

  Args:
    manager: from `opened`.
    state: the state after a step.
    batches: the position of the data iterator.
    metrics: of the validation set at this step, or None.

  Example:
    >>> save(manager, state, batches.get_state(), None)  # doctest: +SKIP
  """
  step = int(state.step)
  if step in manager.all_steps():
    return
  plain, position = arrays(state), dict(batches)
  # All processes compute these; a failure of that is no failure to write.
  found = digests_of(plain, position)
  with saving(manager):
    manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(plain),
        batches=ocp.args.JsonSave(position),
        digests=ocp.args.JsonSave(found),
      ),
      metrics=None if metrics is None else {**metrics, "step": step},
      force=True,
    )


def wait(manager: ocp.CheckpointManager) -> None:
  """Waits until what is being saved is saved.

  Args:
    manager: from `opened`.

  Raises:
    UnsavedCheckpointError: if it could not be.

  Example:
    >>> wait(manager)  # doctest: +SKIP
  """
  with saving(manager):
    manager.wait_until_finished()


@contextlib.contextmanager
def saving(manager: ocp.CheckpointManager) -> Iterator[None]:
  """Says of a save that failed, this one or one before, what to do about it.

  Args:
    manager: from `opened`.

  Yields:
    Nothing.

  Raises:
    UnsavedCheckpointError: if it failed.

  Example:
    >>> with saving(manager):  # doctest: +SKIP
    ...   manager.wait_until_finished()
  """
  try:
    yield
  except (OSError, ValueError, RuntimeError) as error:
    # Of several processes one may have died while the others wait for it.
    if jax.process_count() > 1 and isinstance(
      error, jax.errors.JaxRuntimeError
    ):
      raise
    there = [path.name for path in complete(Path(manager.directory))]
    last = f"after step {max(map(int, there))}" if there else "from the start"
    raise UnsavedCheckpointError(
      f"{manager.directory}: a checkpoint cannot be written"
      f" ({_reason(error)}). Earlier ones are as they were: once it can be, the"
      f" same command goes on {last}."
    ) from error


def _reason(error: Exception) -> str:
  """The system's word for what failed, or the first line of another's."""
  for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
    if os.strerror(number) in str(error):
      return os.strerror(number)
  return str(error).strip().split("\n")[0][:200]
