"""Checkpoints in buckets: those that Orbax can write, and others."""

import pathlib
import shutil
import tempfile

import jax
import numpy as np
import pytest
from etils import epath

from experiments.checkpoints import read, select
from experiments.checkpoints.damage import DamagedCheckpointError
from experiments.checkpoints.listing import check_processes, last_step
from experiments.checkpoints.manager import opened
from experiments.checkpoints.storage import UnsavedCheckpointError
from experiments.errors import UserError
from experiments.run_directory import run_path
from experiments.training import loop
from tests.experiments.bucket import Bucket, bucket  # noqa: F401
from tests.experiments.checkpoints.test_checkpoints import (
  ranked_by,
  saved,
  state_at,
)
from tests.experiments.conftest import make_tiny
from tests.matrix import sampled

RUN = "s3://bucket/run"
MARKER = "commit_success.txt"
both = pytest.mark.parametrize("url", ["gs://bucket/run", RUN])


class OtherPath(pathlib.PosixPath):
  """A user's class of paths: other:// is a folder of the working directory."""

  def rmtree(self, missing_ok=False):
    shutil.rmtree(self, ignore_errors=missing_ok)


@pytest.fixture
def folder(bucket, tmp_path, monkeypatch):  # noqa: F811
  """The folder of the bucket where the run's checkpoints are."""
  paths = epath.register._URI_PREFIXES_TO_CLS
  monkeypatch.setitem(paths, "other://", OtherPath)
  monkeypatch.chdir(tmp_path)
  (tmp_path / "other:").symlink_to(bucket)
  (tmp_path / "temporary").mkdir()
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
  yield bucket / "bucket/run/checkpoints"
  assert not list((tmp_path / "temporary").iterdir())


@pytest.fixture
def accessed(monkeypatch):
  """The names of files of the bucket that are read ("r:") or written ("w:")."""
  names, original = [], Bucket.open

  def open_file(self, path, mode="rb", **kwargs):
    names.append(f"{mode[0]}:{str(path).partition('/checkpoints/')[2]}")
    return original(self, path, mode, **kwargs)

  monkeypatch.setattr(Bucket, "open", open_file)
  return names


def fail_at(monkeypatch, name, access="w"):
  """Makes writing or reading a file fail as a client of a service fails."""
  original = Bucket.open

  def open_file(self, path, mode="rb", **kwargs):
    if access in mode and str(path).endswith(name):
      raise LookupError("no connection")
    return original(self, path, mode, **kwargs)

  monkeypatch.setattr(Bucket, "open", open_file)


def add(manager, step):
  manager.save_state(state_at(step), {"next_index": step}, None)


def names(folder):
  return {path.name for path in folder.iterdir()}


@both
def test_saved_checkpoints_are_listed_ranked_and_restored(url, folder):
  run, config = run_path(url), ranked_by("bleu")
  with saved(run, [1.0, 3.0, None, 2.0]):
    pass
  assert names(folder) == {"10", "20", "30", "40"}
  assert last_step(run) == 40
  with opened(run, config, read_only=True) as manager:
    assert select.choose(manager, "best:2", config) == [40, 20]
    state, position = read.restore(manager, 20, state_at(1))
    params, _ = read.parameters(manager, "30", state_at(1), config)
  expected = state_at(20)
  jax.tree.map(
    np.testing.assert_array_equal,
    (state.params, state.opt_state),
    (expected.params, expected.opt_state),
  )
  assert position == {"next_index": 2}
  np.testing.assert_array_equal(params["w"], state_at(30).params["w"])


@both
def test_checkpoints_that_are_not_kept_are_deleted(url, folder):
  config = ranked_by("bleu").model_copy(update={"keep_last": 1, "keep_best": 1})
  for steps in ([10, 20, 30], [40]):
    with opened(run_path(url), config) as manager:
      for step in steps:
        scores = {"bleu": float(step == 20)}
        manager.save_state(state_at(step), {"next_index": step}, scores)
  assert names(folder) == {"20", "40"}


@pytest.mark.parametrize("url", ["gs://bucket/run", RUN, "other:/bucket/run"])
def test_damaged_checkpoints_are_moved_within_the_bucket(url, folder, caplog):
  run = run_path(url)
  with saved(run, [1.0, None, None]):
    pass
  (folder / "30/state/manifest.ocdbt").write_bytes(b"damaged")
  with opened(run, ranked_by("bleu")) as manager:
    state, _ = read.restore_last(manager, state_at(1))
    assert int(state.step) == 20
    assert f"checkpoint {url}/checkpoints/30 is damaged" in caplog.text
    assert f"moved to {url}/damaged/30" in caplog.text
    add(manager, 30)
  assert names(folder) == {"10", "20", "30"}
  assert (folder.parent / "damaged/30/state/manifest.ocdbt").exists()
  with opened(run, ranked_by("bleu")) as manager:
    state, _ = read.restore_last(manager, state_at(1))
  assert int(state.step) == 30


def test_only_checkpoints_that_are_restored_are_downloaded(folder, accessed):
  with saved(run_path(RUN), [1.0, 3.0, None]):
    pass
  accessed.clear()
  with opened(run_path(RUN), ranked_by("bleu")) as manager:
    assert not any("/state/" in name for name in accessed)
    accessed.clear()
    for _ in range(2):
      read.restore(manager, 20, state_at(1))
  assert all(name.startswith("r:20/") for name in accessed)
  assert len(accessed) == len(set(accessed))


def test_a_checkpoint_is_marked_as_complete_after_its_files(folder, accessed):
  with saved(run_path(RUN), [1.0]):
    pass
  written = [name for name in accessed if name.startswith("w:")]
  files = [path for path in (folder / "10").rglob("*") if path.is_file()]
  assert len(written) == len(set(written)) == len(files)
  assert written[-1] == f"w:10/{MARKER}"


@sampled("report", ["save", "wait", "close"], default=["save"])
def test_a_failed_upload_is_reported_and_its_checkpoint_incomplete(
  report, folder, monkeypatch
):
  run = run_path(RUN)
  message = "no connection.*the same command resumes after step 10"
  with saved(run, [1.0]):
    pass

  def save():
    with opened(run, ranked_by("bleu")) as manager:
      add(manager, 20)
      if report == "wait":
        manager.wait()
      elif report == "save":
        add(manager, 30)

  with monkeypatch.context() as context:
    fail_at(context, f"20/{MARKER}")
    with pytest.raises(UnsavedCheckpointError, match=message):
      save()
  assert (folder / "20/state/_METADATA").exists()
  assert last_step(run) == 10
  (folder / "20/unknown").touch()
  with opened(run, ranked_by("bleu")) as manager:
    assert list(manager.all_steps()) == [10]
    add(manager, 20)
  assert last_step(run) == 20
  assert not (folder / "20/unknown").exists()


def test_an_interrupted_deletion_leaves_no_complete_checkpoint(
  folder, monkeypatch
):
  run, original = run_path(RUN), Bucket.rm

  def rm(self, path, recursive=False, **kwargs):
    if self.exists(path) and str(path).endswith("checkpoints/10"):
      raise LookupError("no connection")
    original(self, path, recursive=recursive, **kwargs)

  monkeypatch.setattr(Bucket, "rm", rm)
  config = ranked_by("bleu").model_copy(update={"keep_last": 1, "keep_best": 0})

  def save():
    with opened(run, config) as manager:
      add(manager, 10)
      add(manager, 20)

  with pytest.raises(UnsavedCheckpointError, match="no connection"):
    save()
  assert (folder / "10/state").is_dir()
  with opened(run, config, read_only=True) as manager:
    assert list(manager.all_steps()) == [20]


def test_a_failed_download_is_not_reported_as_damage(folder, monkeypatch):
  with saved(run_path(RUN), [1.0]):
    pass
  fail_at(monkeypatch, "state/_METADATA", "r")
  with (
    opened(run_path(RUN), ranked_by("bleu")) as manager,
    pytest.raises(UserError, match=r"cannot be read \(.*no conn") as caught,
  ):
    read.restore_last(manager, state_at(1))
  assert not isinstance(caught.value, DamagedCheckpointError)


def test_several_processes_need_storage_that_orbax_can_write(
  bucket,  # noqa: F811
  monkeypatch,
):
  check_processes(run_path("runs/a"))
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  check_processes(run_path("runs/a"))
  check_processes(run_path("gs://bucket/run"))
  with pytest.raises(UserError, match="2 processes write checkpoints together"):
    loop.train_and_evaluate(make_tiny(), RUN)
  assert not list((bucket / "bucket").iterdir())
