"""Links within a directory that may be somebody else's."""

import os
from pathlib import Path

from experiments.errors import UserError


def check_links(workdir: Path) -> None:
  """Checks that nothing in a directory leads out of it.

  Args:
    workdir: the run's directory, perhaps somebody else's.

  Raises:
    UserError: naming a link that does.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   (Path(folder) / "eval").symlink_to("/tmp")
    ...   check_links(Path(folder))
    Traceback (most recent call last):
    experiments.errors.UserError: ...eval: a link that leads out of the run...
  """
  inside = workdir.resolve()
  for folder, folders, files in os.walk(workdir):
    for path in (Path(folder, name) for name in (*folders, *files)):
      if path.is_symlink() and not path.resolve().is_relative_to(inside):
        raise UserError(
          f"{path}: a link that leads out of the run's directory; put what it"
          " leads to in its place, or remove it"
        )
