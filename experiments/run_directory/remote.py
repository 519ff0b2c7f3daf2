"""Run directories in a bucket of Google Cloud Storage.

A bucket has no locks, symbolic links, appending writes or atomic renames. A
file is written as a whole, and readers see its old or its new content. Files
that this package appends to, or reads at positions, are therefore used in a
local folder and copied.
"""

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from experiments.errors import UserError

_URL = re.compile("([a-z][a-z0-9]+):/+(.+)")  # pathlib makes one slash of two
_CHUNK = 1 << 24


def run_path(path: str | os.PathLike[str]) -> Path:
  """Returns a `pathlib.Path`, or an `epath.Path`, which is alike, for gs://."""
  url = _URL.fullmatch(os.fspath(path))
  if not url:
    return Path(path)
  scheme, rest = url.groups()
  if scheme != "gs":
    raise UserError(
      f"{path}: of remote directories, only those of Google Cloud Storage"
      " (gs://) are supported; use one, or mount this one as a file system"
    )
  import fsspec
  from etils import epath

  try:
    fsspec.get_filesystem_class("gcs")
  except ImportError:
    raise UserError(
      f"{path}: needs a package for Google Cloud Storage; run pip install"
      " 'attention-jax[gcs]'"
    ) from None
  return cast(Path, epath.Path(f"gs://{rest}"))


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Whether a path is in a bucket."""
  return "://" in os.fspath(path)


def absolute(path: Path) -> Path:
  """Returns an absolute path, which epath has for local paths only."""
  return path if is_remote(path) else path.absolute()


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
    for name in names:
      _copy_all(workdir / name, self.path / name)
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
  _copy_all(source, target)
  cast(Any, source).rmtree()


def _copy_all(source: Path, target: Path) -> None:
  if source.is_dir():
    for each in source.iterdir():
      _copy_all(each, target / each.name)
  elif source.exists():
    target.parent.mkdir(parents=True, exist_ok=True)
    _copy(source, target)


def _copy(source: Path, target: Path) -> None:
  with source.open("rb") as reader, target.open("wb") as writer:
    shutil.copyfileobj(reader, writer, _CHUNK)
