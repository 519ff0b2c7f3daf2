"""Checks the symbolic links of a run directory that others may have made."""

import os
from pathlib import Path

from experiments.errors import UserError


def check_links(workdir: Path) -> None:
  """Raises UserError if a symbolic link points outside the directory."""
  inside = workdir.resolve()
  for folder, folders, files in os.walk(workdir):
    for path in (Path(folder, name) for name in (*folders, *files)):
      if path.is_symlink() and not path.resolve().is_relative_to(inside):
        raise UserError(
          f"{path}: a link that leads out of the run's directory; replace it"
          " by its target, or remove it"
        )
