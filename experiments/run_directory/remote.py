"""Run directories in a bucket.

A bucket has no locks, symbolic links, appending writes or atomic renames. A
file is written as a whole, and readers see its old or its new content.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

from experiments.errors import UserError

_URL = re.compile("([a-z][a-z0-9]+):/+(.+)")  # pathlib makes one slash of two


class _Service(NamedTuple):
  """What users need for the buckets of a scheme."""

  extra: str  # of pyproject.toml
  credentials: str


_SERVICES = {
  "gs": _Service("gcs", "gcloud auth application-default login"),
  "s3": _Service(
    "s3",
    "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for a service other than"
    " AWS, AWS_ENDPOINT_URL",
  ),
  "az": _Service("az", "AZURE_STORAGE_CONNECTION_STRING"),
  "hf": _Service("hf", "hf auth login"),
}


def run_path(path: str | os.PathLike[str]) -> Path:
  """Returns a `pathlib.Path`, or for a URL an `epath.Path`, which is alike."""
  url = _URL.fullmatch(os.fspath(path))
  if not url:
    return Path(path)
  scheme, rest = url.groups()
  if scheme in _SERVICES:
    _check_package(path, scheme)
    # TensorFlow's clients, which epath prefers, lack most of these schemes.
    os.environ.setdefault("EPATH_USE_TF", "false")
  from etils import epath

  try:
    return cast(Path, epath.Path(f"{scheme}://{rest}"))
  except KeyError:
    known = ", ".join(f"{each}://" for each in _SERVICES)
    raise UserError(
      f"{path}: remote directories are those of {known} and of classes that"
      " are registered by etils.epath.register_path_cls; use one of them, or"
      " mount this one as a file system"
    ) from None


def _check_package(path: str | os.PathLike[str], scheme: str) -> None:
  import fsspec

  try:
    fsspec.get_filesystem_class(scheme)
  except (ImportError, ValueError):  # not installed, or unknown to fsspec
    raise UserError(
      f"{path}: {scheme}:// needs another package; run pip install -e"
      f" '.[{_SERVICES[scheme].extra}]'"
    ) from None


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Whether a path is a URL."""
  return scheme_of(path) is not None


def scheme_of(path: str | os.PathLike[str]) -> str | None:
  """Returns the scheme of a URL, such as "gs"; None for a local path."""
  url = _URL.fullmatch(os.fspath(path))
  return url[1] if url else None


def _service(path: Path) -> _Service | None:
  return _SERVICES.get(scheme_of(path) or "")


def check_reachable(workdir: Path) -> None:
  """Raises UserError if the service of a remote directory does not respond."""
  service = _service(workdir)
  try:
    if service:
      # Files of this process's earlier listings may have changed.
      from etils.epath import backend

      backend.fsspec_backend.fs(workdir).invalidate_cache()
    workdir.exists()
  except Exception as error:  # Clients have no common exception type.
    hint = f" ({service.credentials})" if service else ""
    raise UserError(
      f"--workdir={workdir}: cannot be reached ({error}); check the name of"
      f" the bucket and your credentials{hint}"
    ) from error


@contextlib.contextmanager
def client_errors(path: Path) -> Iterator[None]:
  """Turns the errors of clients, which have no common type, into OSErrors."""
  try:
    yield
  except Exception as error:
    if isinstance(error, OSError) and error.filename:
      raise
    number = getattr(error, "errno", None) or errno.EIO
    reason = getattr(error, "strerror", None) or str(error)
    raise OSError(number, reason, str(path)) from error


def absolute(path: Path) -> Path:
  """Returns an absolute path, which epath has for local paths only."""
  return path if is_remote(path) else path.absolute()


def make_folder(path: Path) -> None:
  """Makes a folder and its parents; a bucket needs none."""
  if not _service(path):  # whose client would make the bucket itself
    path.mkdir(parents=True, exist_ok=True)
