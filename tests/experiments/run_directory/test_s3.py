"""A run in a bucket of S3, with its real client and a server of moto."""

import pytest
from etils.epath import backend

from experiments.run_directory import check_access, run_path
from experiments.training import loop
from tests.experiments.states import (
  assert_same_bits,
  final_state,
  metrics,
  results,
  stop_at,
  tiny_run,
)

pytestmark = [
  pytest.mark.exhaustive,
  pytest.mark.filterwarnings("ignore"),  # of moto and the client
]


@pytest.fixture
def client(monkeypatch):
  """A second client of a server that has an empty bucket."""
  boto3 = pytest.importorskip("boto3")
  moto = pytest.importorskip("moto.server")
  s3fs = pytest.importorskip("s3fs")
  server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
  server.start()
  host, port = server.get_host_and_port()
  for name, value in {
    "AWS_ENDPOINT_URL": f"http://{host}:{port}",
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
  }.items():
    monkeypatch.setenv(name, value)
  s3fs.S3FileSystem.clear_instance_cache()
  backend.fsspec_backend._get_filesystem.cache_clear()
  client = boto3.client("s3")
  client.create_bucket(Bucket="bucket")
  yield client
  server.stop()


def test_a_run_in_s3_resumes_exactly(client, tmp_path, monkeypatch):
  config = tiny_run(steps=8, checkpoint_every=2, eval_every=4, keep_last=2)
  run = run_path("s3://bucket/run")
  stop_at(monkeypatch)
  assert loop.train_and_evaluate(config, tmp_path)
  stop_at(monkeypatch, 5)
  assert not loop.train_and_evaluate(config, run)
  assert loop.train_and_evaluate(config, run)
  assert_same_bits(final_state(tmp_path), final_state(run))
  assert metrics(tmp_path) == metrics(run)
  assert results(tmp_path) == results(run)
  assert {path.name for path in (run / "checkpoints").iterdir()} == {
    path.name for path in (tmp_path / "checkpoints").iterdir()
  }


def test_files_of_other_processes_are_found(client):
  run = run_path("s3://bucket/other")
  client.put_object(Bucket="bucket", Key="other/config.json", Body=b"{}")
  assert [path.name for path in run.iterdir()] == ["config.json"]
  client.put_object(Bucket="bucket", Key="other/versions.json", Body=b"{}")
  check_access(run)
  assert len(list(run.iterdir())) == 2
