"""Saves checkpoints asynchronously; explains what to do where that fails."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from experiments.checkpoints.content import arrays, digests_of
from experiments.checkpoints.damage import MISSING, complete, system_error
from experiments.errors import UserError
from experiments.optimization.step import TrainState


class UnsavedCheckpointError(UserError):
  """A checkpoint could not be written; earlier ones are unchanged."""

  code = 1


def save(
  manager: ocp.CheckpointManager,
  state: TrainState,
  batches: Mapping[str, Any],
  metrics: Mapping[str, float] | None,
) -> None:
  """Starts to save a checkpoint, unless there is one of this step.

  `batches` is the position of the data iterator; `metrics`, of the validation
  set at this step, rank checkpoints. UnsavedCheckpointError if this save or the
  one before failed.
  """
  step = int(state.step)
  if step in manager.all_steps():
    return
  plain, position = arrays(state), dict(batches)
  # Outside of `saving`: all processes compute the digests together.
  digests = digests_of(plain, position)
  with saving(manager):
    manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(plain),
        batches=ocp.args.JsonSave(position),
        digests=ocp.args.JsonSave(digests),
      ),
      metrics=None if metrics is None else {**metrics, "step": step},
      force=True,
    )


def wait(manager: ocp.CheckpointManager) -> None:
  """Waits for the end of a save; UnsavedCheckpointError if it failed."""
  with saving(manager):
    manager.wait_until_finished()


@contextlib.contextmanager
def saving(manager: ocp.CheckpointManager) -> Iterator[None]:
  """Turns a failure to write into an `UnsavedCheckpointError`."""
  try:
    yield
  except (OSError, ValueError, RuntimeError) as error:
    # With several processes JAX fails where another process died.
    lost = isinstance(error, jax.errors.JaxRuntimeError)
    reason = system_error(error)
    if isinstance(error, MISSING):  # somebody removed the folder
      reason = str(error)
    if reason is None or (lost and jax.process_count() > 1):
      raise
    steps = [int(path.name) for path in complete(Path(manager.directory))]
    last = f"after step {max(steps)}" if steps else "from the start"
    raise UnsavedCheckpointError(
      f"{manager.directory}: a checkpoint cannot be written ({reason})."
      " Earlier ones are unchanged: once that is put right, the same command"
      f" resumes {last}."
    ) from error
