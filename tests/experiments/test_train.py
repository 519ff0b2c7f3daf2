"""Training end to end, as processes: learn, stop, die, go on, be evaluated."""

import json
import pathlib
import shutil
import signal
import time

import numpy as np
import pytest

from configs import base
from experiments import inference
from experiments.evaluation import configured_search
from experiments.training import loop
from tests.experiments import processes
from tests.experiments.states import assert_same_bits, final_state

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  """A run that nothing disturbed."""
  folder = tmp_path_factory.mktemp("finished")
  config = processes.write_config(folder)
  workdir = folder / "run"
  code, out, error = processes.run(
    "train", f"--config={config}", f"--workdir={workdir}"
  )
  assert code == 0, error
  return config, workdir, out, error


def test_a_run_leaves_what_it_promises(finished):
  _, workdir, out, error = finished
  for path in (
    "config.json",
    "metrics.jsonl",
    "timings.jsonl",
    "eval/validation.json",
    "eval/test.json",
    "eval/longer.json",
    "eval/longer.txt",
    "figures/alignments_validation.png",
    "figures/accuracy_by_length.png",
  ):
    assert (workdir / path).stat().st_size > 0, path
  assert list(workdir.glob("events.*"))
  lines = [
    json.loads(line)
    for line in (workdir / "metrics.jsonl").read_text().splitlines()
  ]
  assert [line["step"] for line in lines if line["split"] == "train"] == [
    2, 4, 6, 8, 10, 12,
  ]  # fmt: skip
  assert [line["step"] for line in lines if line["split"] == "validation"] == [
    6,
    12,
  ]
  result = json.loads((workdir / "eval" / "test.json").read_text())
  assert result["checkpoint"] == "step 12"
  for name in ("token_accuracy", "sequence_accuracy", "bleu", "perplexity"):
    assert name in result["metrics"]
  assert result["metrics"]["sentences_per_second"] > 0
  assert sum(row["count"] for row in result["by_length"]) == 16
  longer = json.loads((workdir / "eval" / "longer.json").read_text())
  assert {row["length"] for row in longer["by_length"]} == {5, 6}
  assert "token accuracy" in out
  assert "step 12/12" in error
  assert "tokens/s" in error
  assert "Warning" not in error
  assert "Traceback" not in error


def test_evaluate_needs_the_directory_alone_and_agrees(finished, tmp_path):
  _, workdir, _, _ = finished
  moved = tmp_path / "elsewhere"
  shutil.copytree(workdir, moved)
  before = json.loads((moved / "eval" / "test.json").read_text())
  (moved / "eval" / "test.json").unlink()
  (looks,) = moved.glob("figures/*.npz")
  looked = looks.read_bytes()
  code, out, error = processes.run(
    "evaluate", f"--workdir={moved}", cwd=tmp_path
  )
  assert code == 0, error
  after = json.loads((moved / "eval" / "test.json").read_text())
  for result in (before, after):
    del result["metrics"]["sentences_per_second"]
  assert before == after
  assert "sequence accuracy" in out
  assert looks.read_bytes() == looked  # of another set
  assert (moved / "figures" / "alignments_test.png").exists()


def test_evaluate_refuses_what_is_not_there(finished):
  _, workdir, _, _ = finished
  for flag, message in (
    ("--split=tset", "there are: longer, test, validation"),
    ("--checkpoint=7", "no checkpoint '7'; there are"),
  ):
    code, _, error = processes.run("evaluate", f"--workdir={workdir}", flag)
    assert code == 2
    assert message in error
    assert "Traceback" not in error


def test_a_finished_run_is_not_trained_again(finished, tmp_path):
  config, workdir, _, _ = finished
  again = tmp_path / "run"
  shutil.copytree(workdir, again)
  code, _, error = processes.run(
    "train", f"--config={config}", f"--workdir={again}"
  )
  assert code == 0, error
  assert "resuming after step 12" in error
  assert_same_bits(final_state(again), final_state(workdir))
  assert (again / "metrics.jsonl").read_text() == (
    workdir / "metrics.jsonl"
  ).read_text()


def test_another_config_is_refused_and_the_difference_named(finished):
  config, workdir, _, _ = finished
  code, _, error = processes.run(
    "train",
    f"--config={config}",
    f"--workdir={workdir}",
    "--config.model.hidden_size=4",
    "--config.optimizer.learning_rate=0.5",
  )
  assert code == 2
  assert "config.model.hidden_size: 8 there, 4 here" in error
  assert "config.optimizer.learning_rate: 0.003 there, 0.5 here" in error
  assert "Traceback" not in error


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_and_goes_on_later(number, tmp_path):
  config = processes.write_config(tmp_path)
  workdir = tmp_path / "run"
  arguments = (
    "train",
    f"--config={config}",
    f"--workdir={workdir}",
    "--config.train.steps=100000",
    "--config.train.eval_every=100000",
    "--config.train.checkpoint_every=100000",
  )
  process = processes.start(*arguments)
  wait_for_line(process, workdir)
  process.send_signal(number)
  _, error = process.communicate(timeout=30)
  assert process.returncode == 75, error
  assert "the same command goes on" in error
  assert "Traceback" not in error
  (saved,) = (workdir / "checkpoints").iterdir()
  assert 0 < int(saved.name) < 100_000
  process = processes.start(*arguments)
  time.sleep(1)
  wait_for_line(process, workdir)
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate(timeout=60)
  assert f"resuming after step {saved.name}" in error


def wait_for_line(process, workdir, *, needed=True):
  """Waits until training has written metrics, or has ended if it may."""
  path, deadline = workdir / "metrics.jsonl", time.monotonic() + 120
  size = path.stat().st_size if path.exists() else 0
  while not path.exists() or path.stat().st_size <= size:
    if process.poll() is not None and not needed:
      return
    assert process.poll() is None, process.communicate()[1]
    assert time.monotonic() < deadline
    time.sleep(0.05)


def each(damage, step):
  """Damages all files that hold arrays."""
  files = [path for path in step.rglob("state/**/d/*") if path.is_file()]
  assert files
  for path in files:
    damage(path)


DAMAGE = {
  "truncated": lambda step: each(truncate, step),
  "state gone": lambda step: shutil.rmtree(step / "state"),
  "files gone": lambda step: each(pathlib.Path.unlink, step),
  "empty": lambda step: [
    path.write_bytes(b"") for path in step.rglob("*") if path.is_file()
  ],
  "a bit flipped": lambda step: each(flip, step),
  "position changed": lambda step: change_position(
    step / "batches" / "metadata"
  ),
  "position gone": lambda step: shutil.rmtree(step / "batches"),
  "metrics empty": lambda step: truncate(step / "metrics" / "metrics"),
  "a metric renamed": lambda step: rename_metric(step / "metrics" / "metrics"),
}


def flip(path):
  """One bit in the middle, where the numbers are."""
  content = bytearray(path.read_bytes())
  content[len(content) // 2] ^= 1
  path.write_bytes(content)


def change_position(path):
  path.write_text(path.read_text().replace("12", "11"))


def rename_metric(path):
  best = base.get_config().train.best_metric
  path.write_text(path.read_text().replace(f'"{best}"', '"other"'))


def truncate(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_used(
  damage, finished, tmp_path, tiny, caplog
):
  _, workdir, _, _ = finished
  damaged = tmp_path / "run"
  shutil.copytree(workdir, damaged)
  DAMAGE[damage](damaged / "checkpoints" / "12")
  tiny.mesh.data = 1
  with caplog.at_level("INFO", "absl"):
    loop.train_and_evaluate(tiny, damaged)
  assert "checkpoints/12 is damaged" in caplog.text
  assert "resuming after step 9" in caplog.text
  assert (damaged / "damaged" / "12").is_dir()
  assert_same_bits(final_state(damaged), final_state(workdir))


def test_no_readable_checkpoint_is_an_error_not_a_fresh_start(
  finished, tmp_path
):
  config, workdir, _, _ = finished
  damaged = tmp_path / "run"
  shutil.copytree(workdir, damaged)
  for step in (damaged / "checkpoints").iterdir():
    each(truncate, step)
  for _ in range(2):  # asking again must not start over either
    code, _, error = processes.run(
      "train", f"--config={config}", f"--workdir={damaged}"
    )
    assert code == 2
    assert "No checkpoint of the run can be read" in error
    assert "Traceback" not in error
  assert (damaged / "checkpoints" / "12").is_dir()


@pytest.mark.parametrize("damage", ["truncated", "empty"])
def test_evaluate_names_a_damaged_checkpoint(damage, finished, tmp_path):
  _, workdir, _, _ = finished
  damaged = tmp_path / "run"
  shutil.copytree(workdir, damaged)
  DAMAGE[damage](damaged / "checkpoints" / "12")
  code, _, error = processes.run("evaluate", f"--workdir={damaged}")
  assert code == 2
  assert "checkpoints/12 is damaged" in error
  assert damage == "empty" or "--checkpoint=" in error
  assert "Traceback" not in error
  assert (damaged / "checkpoints" / "12").is_dir()


ON_EIGHT = ("--config.mesh.data=2", "--config.mesh.fsdp=4")


def test_eight_devices_give_the_losses_of_one(finished, tmp_path):
  """And what they leave is used, and gone on with, by another number."""
  config, workdir, _, _ = finished
  run = tmp_path / "run"
  arguments = ["train", f"--config={config}", f"--workdir={run}"]
  code, _, error = processes.run(*arguments, *ON_EIGHT, devices=8)
  assert code == 0, error
  assert "8 devices: data 2, fsdp 4" in error
  assert_same_losses(workdir, run)
  shutil.rmtree(run / "checkpoints" / "12")
  code, _, error = processes.run(*arguments, "--config.mesh.data=1")
  assert code == 0, error
  assert "resuming after step 9" in error
  assert_same_losses(workdir, run)


def test_eight_devices_go_on_with_a_run_of_one(finished, tmp_path):
  config, workdir, _, _ = finished
  run = tmp_path / "run"
  shutil.copytree(workdir, run)
  shutil.rmtree(run / "checkpoints" / "12")
  arguments = ["train", f"--config={config}", f"--workdir={run}"]
  code, _, error = processes.run(*arguments, *ON_EIGHT, devices=8)
  assert code == 0, error
  assert "resuming after step 9" in error
  assert_same_losses(workdir, run)


def assert_same_losses(one, other):
  losses = [
    [
      line["loss"]
      for line in map(
        json.loads, (each / "metrics.jsonl").read_text().splitlines()
      )
      if line["split"] == "train"
    ]
    for each in (one, other)
  ]
  assert len(losses[0]) == 6
  np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.parametrize(
  ("count", "mesh"),
  [(2, []), (4, ["--config.mesh.data=2", "--config.mesh.fsdp=2"])],
)
def test_several_processes_give_the_losses_of_one(
  finished, tmp_path, count, mesh
):
  config, workdir, _, _ = finished
  process = processes.launch(
    count,
    "train",
    f"--config={config}",
    f"--workdir={tmp_path / 'run'}",
    *mesh,
  )
  out, error = process.communicate(timeout=300)
  assert process.returncode == 0, error
  assert f"{count} cpu device(s)" in error
  assert out.count("sequence accuracy") == 6  # printed by one alone
  assert_same_losses(workdir, tmp_path / "run")
  state = tmp_path / "run" / "checkpoints" / "12" / "state"
  written = {path.parts[-3] for path in state.glob("ocdbt.process_*/d/*")}
  assert written == {f"ocdbt.process_{index}" for index in range(count)}
  finished = inference.restore(tmp_path / "run")
  search = configured_search(finished.experiment)
  examples = finished.experiment.data.evaluation_set("test")
  evaluation = inference.evaluate(finished, examples, search)
  stored = json.loads((tmp_path / "run" / "eval" / "test.json").read_text())
  assert evaluation.metrics["loss"] == pytest.approx(stored["metrics"]["loss"])


def test_processes_share_tokens_and_heads(tmp_path):
  config = processes.write_config(tmp_path)
  shared = ("--config.mesh.sequence=2", "--config.mesh.tensor=2")
  for count, name, mesh in ((1, "alone", ()), (4, "shared", shared)):
    process = processes.launch(
      count,
      "train",
      f"--config={config}:transformer",
      f"--workdir={tmp_path / name}",
      "--config.mesh.data=1",
      *mesh,
    )
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
  assert "sequence 2, tensor 2" in error
  assert_same_losses(tmp_path / "alone", tmp_path / "shared")


def test_sigterm_to_the_launcher_stops_all_processes_after_one_step(tmp_path):
  config = processes.write_config(tmp_path)
  workdir = tmp_path / "run"
  process = processes.launch(
    2,
    "train",
    f"--config={config}",
    f"--workdir={workdir}",
    "--config.train.steps=100000",
    "--config.train.eval_every=100000",
    "--config.train.checkpoint_every=100000",
  )
  wait_for_line(process, workdir)
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate(timeout=60)
  assert process.returncode == 75, error
  assert "the same command goes on" in error
  assert len(list((workdir / "checkpoints").iterdir())) == 1


def test_the_launcher_reports_a_process_that_fails():
  process = processes.launch(2, "train", "--config=nowhere.py")
  _, error = process.communicate(timeout=60)
  assert process.returncode == 2
  assert "a process failed with code 2" in error


def test_what_only_the_first_process_finds_wrong_stops_all(finished):
  config, workdir, _, _ = finished
  process = processes.launch(
    2, "train", f"--config={config}", f"--workdir={workdir}", "--config.seed=1"
  )
  _, error = process.communicate(timeout=60)
  assert process.returncode != 0
  assert "error: --workdir=" in error
  assert "config.seed: 0 there, 1 here" in error
  assert "stopping the others" in error


@pytest.mark.parametrize("count", ["", "0", "two"])
def test_the_launcher_wants_a_number_of_processes(count):
  process = processes.launch(count, "train")
  _, error = process.communicate(timeout=60)
  assert process.returncode == 2
  assert "needs a number of processes" in error


def test_checkpoints_open_for_reading_change_nothing(finished, tmp_path):
  _, workdir, _, _ = finished
  copied = tmp_path / "run"
  shutil.copytree(workdir, copied)
  before = sorted(str(path) for path in copied.rglob("*"))
  assert inference.restore(copied).used == "step 12"
  assert before == sorted(str(path) for path in copied.rglob("*"))
