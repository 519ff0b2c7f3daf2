"""Runs in a bucket, which is a local fake."""

import pathlib

import fsspec
import pytest
from etils import epath
from etils.epath import backend

import experiments
from experiments import inference
from experiments.errors import UserError
from experiments.inference.export import export_parameters
from experiments.run_directory import LocalFiles, is_remote, run_path
from experiments.training import loop
from tests.experiments.bucket import bucket  # noqa: F401
from tests.experiments.conftest import make_tiny_translation
from tests.experiments.states import (
  assert_same_bits,
  final_state,
  metrics,
  results,
  stop_at,
)

REMOTE = "s3://bucket/runs/text"
SCHEMES = ["s3", pytest.param("gs", marks=pytest.mark.exhaustive)]
LINE = "a dog sleeps today!"


def files(folder):
  return {
    path.relative_to(folder).as_posix()
    for path in folder.rglob("*")
    if path.is_file()
  }


def without_checkpoints(names):
  hidden = ("checkpoints/", ".lock", "events.")
  return {name for name in names if not name.startswith(hidden)}


@pytest.fixture
def runs(request, bucket, corpus, tmp_path, monkeypatch, non_finite_losses):  # noqa: F811
  """The same run twice: local and not stopped, remote and stopped.

  The remote run stops after a step at which the other saves no checkpoint. Such
  a checkpoint does not count among the last 2, and the number of skipped
  updates does not restart at 0.
  """
  config = make_tiny_translation(corpus, "none")
  config.mesh.data = 1
  config.model.dropout_rate = 0.1
  config.train.update(non_finite="skip", log_every=1, ema_decay=0.9)
  # Fewer programs to compile.
  config.data.num_shapes = 1
  config.evaluation.beam_size = 1
  remote = run_path(f"{request.param}://bucket/runs/text")
  local = tmp_path / "local"
  stop_at(monkeypatch)
  assert loop.train_and_evaluate(config, local)
  stop_at(monkeypatch, 7)
  assert not loop.train_and_evaluate(config, remote)
  assert loop.train_and_evaluate(config, remote)
  return local, remote


@pytest.mark.parametrize("runs", SCHEMES, indirect=True)
def test_a_remote_run_resumes_exactly_and_is_usable(runs, bucket, tmp_path):  # noqa: F811
  local, remote = runs
  assert_same_bits(final_state(local), final_state(remote))
  assert metrics(local) == metrics(remote)
  assert results(local) == results(remote)
  used = results(remote)["test.json"]["checkpoint"]
  assert used == "mean of 2 steps, 6 to 8"
  assert metrics(remote, "train")[-1]["skipped"] > 1
  folder = bucket / "bucket/runs/text"
  assert without_checkpoints(files(local)) == without_checkpoints(files(folder))
  assert any(path.name.startswith("events.") for path in folder.iterdir())

  run = experiments.load(remote)
  expected = experiments.load(local).translate([LINE])
  assert run.translate([LINE]) == expected
  exported = run_path(f"{str(remote)[:2]}://bucket/exported")
  export_parameters(inference.restore(remote), remote, exported)
  assert experiments.load(exported).translate([LINE]) == expected


def test_a_local_path_is_that_of_pathlib(tmp_path):
  assert run_path(str(tmp_path)) == tmp_path
  assert type(run_path("runs/a:b")) is type(tmp_path)
  assert not is_remote(run_path("runs/gs:a"))
  assert LocalFiles(tmp_path).path == tmp_path


@pytest.mark.parametrize("path", [REMOTE, pathlib.Path(REMOTE)])
def test_a_url_survives_pathlib(path, bucket):  # noqa: F811
  assert str(run_path(path)) == REMOTE
  assert is_remote(run_path(path))


@pytest.mark.parametrize("path", ["hdfs://bucket/run", "ftp:/run"])
def test_other_remote_directories_are_refused(path):
  with pytest.raises(UserError, match="those of gs://, s3://, az://, hf://"):
    run_path(path)


def test_a_registered_class_of_paths_is_used(monkeypatch):
  class Elsewhere(pathlib.PurePosixPath):
    """Paths of a service that a user has."""

  known = {"elsewhere://": Elsewhere}
  monkeypatch.setattr(epath.register, "_URI_PREFIXES_TO_CLS", known)
  path = run_path("elsewhere:/bucket/run")
  assert isinstance(path, Elsewhere)
  assert is_remote(path)


@pytest.mark.parametrize("scheme", ["gs", "s3", "az", "hf"])
def test_a_bucket_without_its_package_is_refused(scheme, monkeypatch):
  def missing(_):
    raise ImportError

  monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
  extra = {"gs": "gcs"}.get(scheme, scheme)
  with pytest.raises(UserError, match=rf"install -e '\.\[{extra}\]'"):
    run_path(f"{scheme}://bucket/run")


def test_an_unreachable_bucket_is_refused(bucket, monkeypatch):  # noqa: F811
  def refuse(path):
    raise RuntimeError("Anonymous caller")

  monkeypatch.setattr(backend.fsspec_backend, "exists", refuse)
  message = r"cannot be reached \(Anonymous caller.*\(AWS_ACCESS_KEY_ID"
  with pytest.raises(UserError, match=message):
    experiments.load(REMOTE)


def test_only_changed_files_are_uploaded(bucket):  # noqa: F811
  folder = bucket / "bucket/run"
  (folder / "data").mkdir(parents=True)
  (folder / "data/a").write_text("a")
  (folder / "data/b").write_text("b")
  files = LocalFiles(run_path("s3://bucket/run"), ["data", "missing"])
  (folder / "data/a").write_text("changed by another process")
  (files.path / "data/b").write_text("new b")
  (files.path / "c").write_text("c")
  files.upload()
  assert (folder / "data/a").read_text() == "changed by another process"
  assert (folder / "data/b").read_text() == "new b"
  assert (folder / "c").read_text() == "c"
  files.close()
  assert not files.path.exists()
