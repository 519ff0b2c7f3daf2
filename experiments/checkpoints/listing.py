"""The folders of a run's checkpoints, listed without Orbax."""

from pathlib import Path

import jax

from experiments.errors import UserError
from experiments.run_directory import CHECKPOINTS, is_remote, scheme_of

COMMITTED = "commit_success.txt"  # of Orbax, in a bucket


def complete(folder: Path) -> list[Path]:
  """Returns the folders of the complete checkpoints, unsorted."""
  steps = [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]
  if is_remote(folder):  # where a complete folder cannot be renamed
    return [path for path in steps if (path / COMMITTED).exists()]
  return steps


def complete_steps(folder: Path) -> set[int]:
  """Returns the steps of the complete checkpoints."""
  return {int(path.name) for path in complete(folder)}


def last_step(workdir: Path) -> int | None:
  """Returns the step of the last complete checkpoint of a run, if any."""
  return max(complete_steps(workdir / CHECKPOINTS), default=None)


def is_uploaded(path: Path) -> bool:
  """Whether checkpoints are copied to a path, where Orbax cannot write."""
  return scheme_of(path) not in (None, "gs")


def check_processes(workdir: Path) -> None:
  """Raises UserError if several processes cannot write one checkpoint."""
  if is_uploaded(workdir) and jax.process_count() > 1:
    raise UserError(
      f"--workdir={workdir}: {jax.process_count()} processes write checkpoints"
      " together, which needs gs:// or a directory that they share; use one, or"
      " one process"
    )
