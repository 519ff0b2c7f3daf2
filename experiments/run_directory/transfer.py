"""Copies files of a remote run directory to a local folder, and back.

Files that this package appends to, or reads at positions, are used in a local
folder, because a bucket only has files that are written and read as a whole.
"""

import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from experiments.run_directory.remote import (
  client_errors,
  is_remote,
  make_folder,
)

_CHUNK = 1 << 24


class LocalFiles:
  """Files of a run in a local folder, `path`.

  This is the run directory itself if it is local. Otherwise it is a temporary
  folder, to which files are downloaded and from which `upload` copies those
  that have changed.
  """

  def __init__(self, workdir: Path, names: Iterable[str] = ()):
    """Downloads files and folders of these names, if they exist."""
    self.path = workdir
    self._remote: Path | None = None
    if not is_remote(workdir):
      return
    folder = tempfile.TemporaryDirectory(prefix="attention-jax-")
    self.path, self._remote = Path(folder.name), workdir
    self._remove = weakref.finalize(self, folder.cleanup)
    self._states = self._found()
    for name in names:
      self.download(name)

  def download(self, name: str) -> None:
    """Downloads a file or folder, if it exists."""
    if self._remote is not None:
      copy_all(self._remote / name, self.path / name)
      self._states = self._found()

  def upload(self) -> None:
    """Copies new and changed files to the run directory, the newest last."""
    if self._remote is None:
      return
    found = self._found()
    changed = [name for name in found if self._states.get(name) != found[name]]
    for name in sorted(changed, key=lambda name: found[name]):
      _copy(self.path / name, self._remote / name)
    self._states = found

  def close(self) -> None:
    """Uploads changes, and deletes the temporary folder."""
    if self._remote is not None and self._remove.alive:
      self.upload()
      self.discard()

  def discard(self) -> None:
    """Deletes the temporary folder, if there is one."""
    if self._remote is not None:
      self._remove()

  def _found(self) -> dict[str, tuple[int, int]]:
    """Returns the time of change and the size of each file."""
    files = (path for path in self.path.rglob("*") if path.is_file())
    states = ((path, path.stat()) for path in files)
    return {
      path.relative_to(self.path).as_posix(): (state.st_mtime_ns, state.st_size)
      for path, state in states
    }


def move(source: Path, target: Path) -> None:
  """Moves a folder; in a bucket, all files are copied first."""
  if not is_remote(source):
    shutil.move(source, target)
    return
  copy_all(source, target)
  remove(source)


def remove(folder: Path) -> None:
  """Removes a remote folder, if it exists."""
  with client_errors(folder):
    cast(Any, folder).rmtree(missing_ok=True)


def copy_all(source: Path, target: Path) -> None:
  """Copies a file or a folder, if it exists."""
  if source.is_dir():
    for each in source.iterdir():
      copy_all(each, target / each.name)
  elif source.exists():
    make_folder(target.parent)
    _copy(source, target)


def _copy(source: Path, target: Path) -> None:
  with (
    client_errors(target if is_remote(target) else source),
    source.open("rb") as reader,
    target.open("wb") as writer,
  ):
    shutil.copyfileobj(reader, writer, _CHUNK)
