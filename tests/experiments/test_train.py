"""Training end to end: files, messages, signals, damage, devices, processes."""

import json
import pathlib
import re
import shutil
import signal
import time

import numpy as np
import pytest

from configs import base
from experiments import inference
from experiments.errors import UserError
from experiments.evaluation.search import configured_search
from experiments.training import loop
from tests.experiments import processes
from tests.experiments.conftest import make_tiny
from tests.experiments.states import (
  assert_same_bits,
  final_state,
  metrics,
  results,
)
from tests.matrix import sampled

ENDLESS = (
  "--config.train.steps=100000",
  "--config.train.eval_every=100000",
  "--config.train.checkpoint_every=100000",
  "--config.optimizer.schedule=constant",
)


@pytest.fixture
def copied(complete, tmp_path):
  """A copy of the complete run."""
  shutil.copytree(complete.workdir, tmp_path / "run")
  return tmp_path / "run"


def resume(workdir, **mesh):
  """Trains the run of `complete` to its end in this process."""
  config = make_tiny()
  config.mesh.update({"data": 1} | mesh)
  assert loop.train_and_evaluate(config, workdir)


def test_run_writes_its_files_and_reports_progress(complete):
  _, workdir, out, error = complete
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
  lines = metrics(workdir, "train")
  assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
  assert "teacher_forced_accuracy" in lines[0]
  lines = metrics(workdir, "validation")
  assert [line["step"] for line in lines] == [6, 12]
  assert "token_accuracy" in lines[0]
  result = json.loads((workdir / "eval" / "test.json").read_text())
  assert result["checkpoint"] == "step 12"
  for name in ("token_accuracy", "sequence_accuracy", "bleu", "perplexity"):
    assert name in result["metrics"]
  assert result["metrics"]["sentences_per_second"] > 0
  assert sum(row["count"] for row in result["by_length"]) == 16
  longer = json.loads((workdir / "eval" / "longer.json").read_text())
  assert {row["length"] for row in longer["by_length"]} == {5, 6}
  assert "\ntest (greedy, step 12): token accuracy" in out
  assert "step 6: validation (greedy): token accuracy" in error
  assert "\ncompiling the training step\n" in error
  assert "step 12/12" in error
  assert "tokens/s" in error
  assert "Warning" not in error
  assert "Traceback" not in error


def test_evaluate_repeats_the_final_evaluation(copied, tmp_path):
  before = results(copied)
  (copied / "eval" / "test.json").unlink()
  (archive,) = copied.glob("figures/*.npz")
  content = archive.read_bytes()
  out, _ = processes.succeeded("evaluate", f"--workdir={copied}", cwd=tmp_path)
  assert results(copied) == before
  assert "sequence accuracy" in out
  assert archive.read_bytes() == content  # belongs to another set
  assert (copied / "figures" / "alignments_test.png").exists()


@pytest.mark.parametrize(
  ("flag", "message"),
  [
    ("--split=tset", "there are: longer, test, validation"),
    ("--checkpoint=7", "--checkpoint=7: not in "),
  ],
)
def test_evaluate_refuses_unknown_names(flag, message, complete):
  _, workdir, _, _ = complete
  error = processes.refused("evaluate", f"--workdir={workdir}", flag)
  assert message in error
  assert "Traceback" not in error


@pytest.mark.exhaustive
def test_a_complete_run_is_evaluated_and_not_trained_again(complete, copied):
  config, workdir, _, _ = complete
  for path in (copied / "eval").glob("*.json"):
    stored = json.loads(path.read_text())
    stored["metrics"]["sentences_per_second"] = 123456.0
    path.write_text(json.dumps(stored))
  (copied / "eval" / "longer.txt").unlink()
  out, error = processes.succeeded(
    "train", f"--config={config}", f"--workdir={copied}"
  )
  assert "training is complete after step 12" in error
  assert "resuming" not in error
  assert "step 12/12" not in error  # the bar
  assert out.count("(123,456 sentences/s)") == 2  # of the sets with results
  assert_same_bits(final_state(copied), final_state(workdir))
  assert metrics(copied) == metrics(workdir)
  assert results(copied) == results(workdir)


def test_another_config_is_refused_and_the_error_names_the_fields(complete):
  config, workdir, _, _ = complete
  error = processes.refused(
    "train",
    f"--config={config}",
    f"--workdir={workdir}",
    "--config.model.hidden_size=4",
    "--config.optimizer.learning_rate=0.5",
  )
  assert "config.model.hidden_size: stored 8, given 4" in error
  assert "config.optimizer.learning_rate: stored 0.003, given 0.5" in error
  assert "Traceback" not in error


def wait_for_metrics(process, workdir, after=0):
  """Waits until training has written metrics of a later step."""
  path = workdir / "metrics.jsonl"

  def last():
    text = path.read_text() if path.exists() else ""
    return max(map(int, re.findall(r'"step": (\d+)', text)), default=0)

  while last() <= after:
    assert process.poll() is None, process.communicate()
    time.sleep(0.05)


def stop(process, number):
  process.send_signal(number)
  _, error = process.communicate(timeout=600)
  assert process.returncode == 75, error
  assert "the same command resumes it" in error
  assert "Traceback" not in error
  return error


@sampled("number", [signal.SIGTERM, signal.SIGINT], default=[signal.SIGTERM])
def test_signal_saves_and_stops_a_run_and_the_same_command_resumes_it(
  number, tmp_path
):
  path, workdir = processes.write_config(tmp_path), tmp_path / "run"
  arguments = ("train", f"--config={path}:none", f"--workdir={workdir}")
  process = processes.start(*arguments, *ENDLESS)
  wait_for_metrics(process, workdir)
  stop(process, number)
  (saved,) = (workdir / "checkpoints").iterdir()
  step = int(saved.name)
  assert 0 < step < 100_000
  process = processes.start(*arguments, *ENDLESS)
  wait_for_metrics(process, workdir, after=step)
  error = stop(process, number)
  (saved,) = (workdir / "checkpoints").iterdir()
  assert step < int(saved.name) < 100_000
  assert f"resuming after step {step}" in error


def damage_arrays(damage, step):
  """Damages all files that hold arrays."""
  files = [path for path in step.rglob("state/**/d/*") if path.is_file()]
  assert files
  for path in files:
    damage(path)


DAMAGE = {
  "truncated": lambda step: damage_arrays(truncate, step),
  "state gone": lambda step: shutil.rmtree(step / "state"),
  "files gone": lambda step: damage_arrays(pathlib.Path.unlink, step),
  "empty": lambda step: [
    path.write_bytes(b"") for path in step.rglob("*") if path.is_file()
  ],
  "a bit flipped": lambda step: damage_arrays(flip, step),
  "position changed": lambda step: change_position(
    step / "batches" / "metadata"
  ),
  "position gone": lambda step: shutil.rmtree(step / "batches"),
  "metrics empty": lambda step: truncate(step / "metrics" / "metrics"),
  "a metric renamed": lambda step: rename_metric(step / "metrics" / "metrics"),
}


def flip(path):
  """Flips one bit in the middle of a file, where the arrays are."""
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_moved_and_the_previous_one_is_restored(
  damage, complete, copied
):
  config, workdir, _, _ = complete
  DAMAGE[damage](copied / "checkpoints" / "12")
  _, error = processes.succeeded(
    "train", f"--config={config}", f"--workdir={copied}"
  )
  assert "checkpoints/12 is damaged" in error
  assert "resuming after step 9" in error
  assert (copied / "damaged" / "12").is_dir()
  assert_same_bits(final_state(copied), final_state(workdir))


def test_run_without_a_readable_checkpoint_raises_and_does_not_restart(copied):
  for step in (copied / "checkpoints").iterdir():
    damage_arrays(truncate, step)
  for _ in range(2):  # a second attempt must not start from scratch either
    with pytest.raises(UserError, match="No checkpoint of the run can be read"):
      resume(copied)
  assert (copied / "checkpoints" / "12").is_dir()


@pytest.mark.parametrize("damage", ["truncated", "empty"])
def test_error_about_a_damaged_checkpoint_names_the_others(damage, copied):
  DAMAGE[damage](copied / "checkpoints" / "12")
  with pytest.raises(UserError, match="checkpoints/12 is damaged") as caught:
    inference.restore(copied)
  assert damage == "empty" or "--checkpoint=" in str(caught.value)
  assert (copied / "checkpoints" / "12").is_dir()


def test_restore_changes_no_file(copied):
  before = sorted(str(path) for path in copied.rglob("*"))
  assert inference.restore(copied).checkpoint == "step 12"
  assert before == sorted(str(path) for path in copied.rglob("*"))


ON_EIGHT = {"data": 2, "fsdp": 4}


@pytest.mark.exhaustive
def test_eight_devices_give_the_losses_of_one(complete, tmp_path):
  """One device then resumes the run of eight."""
  run = tmp_path / "run"
  resume(run, **ON_EIGHT)
  assert_same_losses(complete.workdir, run)
  shutil.rmtree(run / "checkpoints" / "12")
  resume(run)
  assert_same_losses(complete.workdir, run)


@pytest.mark.exhaustive
def test_eight_devices_resume_a_run_of_one(complete, copied, caplog):
  shutil.rmtree(copied / "checkpoints" / "12")
  with caplog.at_level("INFO", "absl"):
    resume(copied, **ON_EIGHT)
  assert "resuming after step 9" in caplog.text
  assert_same_losses(complete.workdir, copied)


def assert_same_losses(one, other):
  losses = [
    [line["loss"] for line in metrics(each, "train")] for each in (one, other)
  ]
  assert len(losses[0]) == 6
  np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  ("count", "mesh"),
  [(2, []), (4, ["--config.mesh.data=2", "--config.mesh.fsdp=2"])],
)
def test_several_processes_give_the_losses_of_one(
  complete, tmp_path, count, mesh
):
  config, workdir, _, _ = complete
  process = processes.launch(
    count, "train", f"--config={config}", f"--workdir={tmp_path / 'run'}", *mesh
  )
  out, error = process.communicate()
  assert process.returncode == 0, error
  assert f"{count} cpu device(s)" in error
  assert out.count("sequence accuracy") == 6  # printed by one process
  assert_same_losses(workdir, tmp_path / "run")
  state = tmp_path / "run" / "checkpoints" / "12" / "state"
  written = {path.parts[-3] for path in state.glob("ocdbt.process_*/d/*")}
  assert written == {f"ocdbt.process_{index}" for index in range(count)}
  restored = inference.restore(tmp_path / "run")
  search = configured_search(restored.experiment)
  examples = restored.experiment.data.evaluation_set("test")
  evaluation = inference.evaluate(restored, examples, search)
  stored = json.loads((tmp_path / "run" / "eval" / "test.json").read_text())
  assert evaluation.metrics["loss"] == pytest.approx(stored["metrics"]["loss"])


@pytest.mark.exhaustive
def test_processes_shard_tokens_and_heads(tmp_path):
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
    _, error = process.communicate()
    assert process.returncode == 0, error
  assert "sequence 2, tensor 2" in error
  assert_same_losses(tmp_path / "alone", tmp_path / "shared")


@pytest.mark.exhaustive
def test_sigterm_to_the_launcher_stops_all_processes_after_one_step(tmp_path):
  config, workdir = processes.write_config(tmp_path), tmp_path / "run"
  process = processes.launch(
    2, "train", f"--config={config}", f"--workdir={workdir}", *ENDLESS
  )
  wait_for_metrics(process, workdir)
  process.send_signal(signal.SIGTERM)
  _, error = process.communicate()
  assert process.returncode == 75, error
  assert "the same command resumes it" in error
  assert len(list((workdir / "checkpoints").iterdir())) == 1


@pytest.mark.exhaustive
def test_an_error_of_the_first_process_stops_the_others(complete):
  config, workdir, _, _ = complete
  process = processes.launch(
    2, "train", f"--config={config}", f"--workdir={workdir}", "--config.seed=1"
  )
  _, error = process.communicate()
  assert process.returncode != 0
  assert "error: --workdir=" in error
  assert "config.seed: stored 0, given 1" in error
  assert "stopping the others" in error
