"""Buckets on the local disk."""

import os
import pathlib

import fsspec
import pytest
from etils.epath import backend
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from orbax.checkpoint._src.path import gcs_utils


class Bucket(DirFileSystem):
  """Like `gcsfs` and `s3fs`: no appending; a folder exists if it has files."""

  protocol = ("gs", "gcs", "s3")
  cachable = False

  def open(self, path, mode="rb", **kwargs):
    """Opens an object, which is replaced as a whole."""
    if "a" in mode or "+" in mode:
      raise NotImplementedError(f"{path}: objects cannot be changed")
    if "w" in mode:
      os.makedirs(os.path.dirname(self._join(path)), exist_ok=True)
    return super().open(path, mode, **kwargs)

  def mkdir(self, path, **_):
    """Does nothing, or makes the bucket."""
    if not str(path).startswith("gs://"):
      raise AssertionError(f"{path}: the client would make a missing bucket")

  makedirs = mkdir

  def rm(self, path, recursive=False, **kwargs):
    """Removes objects, and folders that are empty then."""
    super().rm(path, recursive=recursive, **kwargs)
    parent = pathlib.Path(self._join(path)).parent
    while parent != pathlib.Path(self.path) and not any(parent.iterdir()):
      parent.rmdir()
      parent = parent.parent

  def rename(self, path1, path2, **kwargs):
    """Copies objects and removes them."""
    source, target = self._join(path1), self._join(path2)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    self.fs.mv(source, target, **kwargs)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """Makes a folder of gs:// and s3://, and returns this folder."""
  root = tmp_path / "buckets"
  (root / "bucket").mkdir(parents=True)
  fake = Bucket(path=str(root), fs=LocalFileSystem())
  monkeypatch.setattr(fsspec, "get_filesystem_class", lambda name: Bucket)
  monkeypatch.setattr(backend.fsspec_backend, "fs", lambda path: fake)

  # TensorStore has its own client of buckets.
  def folder(path):
    name = str(path).removeprefix("gs://")
    return {"driver": "file", "path": str(root / name)}

  monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", folder)
  monkeypatch.setattr(
    gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False
  )
  return root
