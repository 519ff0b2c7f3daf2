"""Saves checkpoints asynchronously, and reports failures to write."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.checkpoints.content import arrays, digests
from experiments.checkpoints.damage import MISSING, system_error
from experiments.checkpoints.storage import Manager
from experiments.errors import UserError
from experiments.optimization.step import TrainState


class UnsavedCheckpointError(UserError):
  """A checkpoint could not be written; earlier ones are unchanged."""

  code = 1


def save(
  manager: Manager,
  state: TrainState,
  batches: Mapping[str, Any],  # the position of the data iterator
  metrics: Mapping[str, float] | None,  # of the validation set, which rank it
) -> None:
  """Starts to save a checkpoint, unless this step has one."""
  step = int(state.step)
  if step in manager.all_steps():
    return
  plain, position = arrays(state), dict(batches)
  # Not in `saving`: a failed collective operation is no failure to write.
  checksums = digests(plain, position)
  with saving(manager):
    manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(plain),
        batches=ocp.args.JsonSave(position),
        digests=ocp.args.JsonSave(checksums),
      ),
      metrics=None if metrics is None else {**metrics, "step": step},
      force=True,
    )


def wait(manager: Manager) -> None:
  """Waits for the end of a save, and reports its failure."""
  with saving(manager):
    manager.wait_until_finished()


@contextlib.contextmanager
def saving(manager: Manager) -> Iterator[None]:
  """Turns a failure to write into an `UnsavedCheckpointError`."""
  try:
    yield
  except (OSError, ValueError, RuntimeError) as error:
    # With several processes, JAX raises this when another process has died.
    lost = isinstance(error, jax.errors.JaxRuntimeError)
    reason = system_error(error)
    if isinstance(error, MISSING):  # the folder was removed
      reason = str(error)
    if reason is None or (lost and jax.process_count() > 1):
      raise
    steps = manager.saved_steps()
    last = f"after step {max(steps)}" if steps else "from the start"
    raise UnsavedCheckpointError(
      f"{manager.folder}: a checkpoint cannot be written ({reason})."
      " Earlier ones are unchanged: once that is put right, the same command"
      f" resumes {last}."
    ) from error
