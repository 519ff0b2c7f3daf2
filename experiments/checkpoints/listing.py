"""The folders of a run's checkpoints, listed without Orbax."""

from pathlib import Path

from experiments.run_directory import is_remote

FOLDER = "checkpoints"  # in a run directory
_COMMITTED = "commit_success.txt"  # of Orbax, in a bucket


def complete(folder: Path) -> list[Path]:
  """Returns the folders of the complete checkpoints, unsorted."""
  steps = [path for path in folder.glob("[0-9]*") if path.name.isdecimal()]
  if is_remote(folder):  # where Orbax cannot rename a complete folder
    return [path for path in steps if (path / _COMMITTED).exists()]
  return steps


def last_step(workdir: Path) -> int | None:
  """Returns the step of the last complete checkpoint of a run, if any."""
  steps = (int(path.name) for path in complete(workdir / FOLDER))
  return max(steps, default=None)
