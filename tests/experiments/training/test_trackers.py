"""Trackers receive what the files of metrics store."""

import json
from contextlib import closing

import pytest

from experiments.config import parse
from experiments.errors import UserError
from experiments.run_directory import claim
from experiments.training import loop, start, trackers
from experiments.training.metrics_writer import MetricsWriter
from tests.experiments.states import tiny_run


class Recorded:
  """A tracker that keeps what it receives."""

  def __init__(self):
    self.lines, self.closed = [], False

  def log(self, step, values):
    self.lines.append((step, dict(values)))

  def close(self):
    self.closed = True


def write(tracker, workdir, first, steps):
  with closing(MetricsWriter(workdir, first, lambda: tracker)) as writer:
    for step in steps:
      writer.metrics(step, "train", {"loss": 1 / step})
      writer.timings(step, "validation", {"seconds": 2.0 * step})


def test_a_tracker_receives_the_lines_of_both_files(tmp_path):
  tracker = Recorded()
  write(tracker, tmp_path, 0, [1, 2])
  assert tracker.closed
  stored = [
    json.loads(line)
    for name in ("metrics.jsonl", "timings.jsonl")
    for line in (tmp_path / name).read_text().splitlines()
  ]
  assert sorted(tracker.lines, key=str) == sorted(
    (
      (
        line.pop("step"),
        {f"{split}/{name}": value for name, value in line.items()},
      )
      for line in stored
      for split in [line.pop("split")]
    ),
    key=str,
  )


def test_a_tracker_without_metrics_is_not_started(tmp_path):
  def start():
    raise AssertionError

  MetricsWriter(tmp_path, 0, start).close()


def test_a_missing_package_leaves_the_directory_unclaimed(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
  # Before it reads text and trains tokenizers.
  monkeypatch.delattr(start, "make_experiment")
  config = tiny_run(tracker="wandb")
  with pytest.raises(UserError, match=r"pip install -e '\.\[wandb\]'"):
    loop.train_and_evaluate(config, tmp_path / "run")
  assert claim(tmp_path / "run", tiny_run().to_dict())


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_offline_resumes_one_run(tmp_path, monkeypatch):
  pytest.importorskip("wandb")
  monkeypatch.setenv("WANDB_MODE", "offline")
  monkeypatch.setenv("WANDB_SILENT", "true")
  config = parse(tiny_run(tracker="wandb").to_dict())
  for first, steps in ((0, [1, 2, 3]), (2, [3, 4])):
    write(
      trackers.make_tracker(config, tmp_path, first), tmp_path, first, steps
    )
  number = (tmp_path / "wandb_id").read_text()
  runs = sorted((tmp_path / "wandb").glob(f"offline-run-*-{number}"))
  assert runs
  logs = sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{number}.wandb"))
  content = b"".join(path.read_bytes() for path in logs)
  for name in (b"train/loss", b"validation/seconds", b"hidden_size"):
    assert name in content
