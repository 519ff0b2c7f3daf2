"""Whole comparisons: trials in processes, failures, signals, the report."""

import shutil
import signal
import sys
import time

import pytest

from experiments import progress
from experiments.comparison import report, results, runner
from experiments.errors import StoppedError
from tests.experiments import processes
from tests.experiments.comparison.trials import make_trials, write_results
from tests.experiments.conftest import make_tiny


def test_trained_trials_are_reported(complete, tmp_path):
  score = make_tiny().model.attention
  (trial,) = make_trials({"model.attention": [score]}, tmp_path)
  shutil.copytree(complete.workdir, trial.workdir)
  (outcome,) = runner.run([trial], num_jobs=1)
  assert outcome.error is None
  found, failed = results.read_all([outcome])
  assert not failed
  path = report.write(
    found, [], tmp_path, command="", metric="sequence_accuracy"
  )
  assert f"| {score} | 1 | " in path.read_text()
  assert runner.last_logged_step(trial) == 12
  points = (tmp_path / "curves.csv").read_text().splitlines()
  assert points[-1].startswith(f"{score},0,12,")


def test_directory_that_cannot_be_created_fails_only_its_trial(tmp_path):
  trials = make_trials({"model.attention": ["dot", "general"]}, tmp_path)
  (tmp_path / "dot").write_text("")
  write_results(trials[1], 0.5)
  first, second = runner.run(trials, num_jobs=1)
  assert f"{trials[0].workdir}: " in first.error
  assert second.error is None


def python(trial, code):
  """The trial, with a command that runs Python code."""
  return trial._replace(command=(sys.executable, "-c", code))


def test_the_error_of_the_last_attempt_is_reported(tmp_path):
  (trial,) = make_trials({"model.attention": ["dot"]}, tmp_path)
  for code, error in (
    ("import sys; print('error: one'); sys.exit(2)", "code 2: error: one ("),
    ("import os; os.abort()", "exit code -6: no output ("),
  ):
    (outcome,) = runner.run([python(trial, code)], num_jobs=1)
    assert error in outcome.error


def test_a_failed_trial_counts_the_steps_that_it_has_trained(tmp_path):
  trials = make_trials({"model.attention": ["dot", "general"]}, tmp_path)
  failed, complete = trials
  outcomes = {
    failed.workdir: runner.Outcome(failed, "exit code 2"),
    complete.workdir: runner.Outcome(complete, None),
  }
  assert [runner._steps_done(each, outcomes) for each in trials] == [0, 12]
  write_results(failed, 0.5)  # its log has all steps
  assert runner._steps_done(failed, outcomes) == 12


def test_trials_are_terminated_if_the_comparison_fails(tmp_path, monkeypatch):
  (trial,) = make_trials({"model.attention": ["dot"]}, tmp_path)
  started = []

  def start_counted(trial):
    started.append(start(trial))
    return started[-1]

  def fail(_):
    if started:
      raise OSError("no terminal")
    return 0

  start = runner._start
  monkeypatch.setattr(runner, "last_logged_step", fail)
  monkeypatch.setattr(runner, "_start", start_counted)
  with pytest.raises(OSError, match="no terminal"):
    runner.run([python(trial, "import time; time.sleep(600)")], num_jobs=1)
  assert started[0].process.wait(timeout=600) == -signal.SIGTERM


def test_a_log_file_gets_few_lines_of_progress(tmp_path, capsys, monkeypatch):
  (trial,) = make_trials({"model.attention": ["dot"]}, tmp_path)
  monkeypatch.setattr(runner, "_POLL_SECONDS", 0.01)
  # Longer than the trial takes on a busy machine: no line falls in between.
  monkeypatch.setattr(progress, "_LINE_EVERY", 3600)
  runner.run([python(trial, "import time; time.sleep(0.5)")], num_jobs=1)
  text = capsys.readouterr().err
  assert "dot, seed 0: done" in text
  assert text.count("step/s") < 6
  assert "\r" not in text


def test_a_signal_stops_the_trials_and_starts_no_more(tmp_path, monkeypatch):
  trials = make_trials({"model.attention": ["dot", "general"]}, tmp_path)
  trials = [python(trial, "import time; time.sleep(600)") for trial in trials]
  start, handler = runner._start, signal.getsignal(signal.SIGHUP)

  def start_and_interrupt(trial):
    attempt = start(trial)
    signal.raise_signal(signal.SIGHUP)
    return attempt

  monkeypatch.setattr(runner, "_start", start_and_interrupt)
  with pytest.raises(StoppedError, match="same command continues"):
    runner.run(trials, num_jobs=1)
  assert (trials[0].workdir / runner.LOG).exists()
  assert not trials[1].workdir.exists()
  assert signal.getsignal(signal.SIGHUP) == handler


@pytest.mark.exhaustive
def test_fewer_seeds_than_before_warn_of_what_the_report_leaves_out(tmp_path):
  folder = tmp_path / "c"
  sweep = {"model.attention": ["dot", "none"]}
  for trial in make_trials(sweep, folder, num_seeds=2):
    write_results(trial, 0.5)
  out, error = processes.succeeded(
    "compare",
    f"--config={processes.write_config(tmp_path)}",
    "--scores=dot",
    "--seeds=1",
    f"--workdir={folder}",
  )
  assert "warning: --seeds=1: the report leaves out dot/seed-1," in error
  assert "| dot | 1 |" in out


@pytest.mark.exhaustive
def test_compare_continues_after_failures_and_interrupts(tmp_path):
  config = processes.write_config(tmp_path)
  folder = tmp_path / "comparison"
  arguments = (
    "compare",
    f"--config={config}",
    "--config.train.log_every=1",
    "--sweep=optimizer.learning_rate=1e30,0.01",
    "--seeds=1",
    f"--workdir={folder}",
  )
  process = processes.start(*arguments)
  second = folder / "learning_rate=0.01" / "seed-0"
  deadline = time.monotonic() + 600
  while not (second / "metrics.jsonl").exists():
    assert process.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.01)
  process.send_signal(signal.SIGINT)
  _, error = process.communicate(timeout=600)
  assert process.returncode == 75, error
  assert "2/2 trials" not in error
  assert "learning_rate=1e+30, seed 0: exit code 2: error: step" in error
  assert "the same command continues" in error
  code, out, error = processes.run(*arguments)
  assert code == 1, error  # one trial fails again
  assert "1 of 2 trials failed" in out
  assert "| learning_rate=0.01 | 1 |" in out
  before = (folder / "report.md").read_text()
  error = processes.refused(*arguments, "--config.train.steps=11")
  assert "every trial failed, so no report is written" in error
  assert "config.train.steps: stored 12, given 11" in error
  assert (folder / "report.md").read_text() == before
  error = processes.refused("compare", f"--config={config}", *arguments[-1:])
  assert "nothing to compare" in error
  error = processes.refused(*arguments, "--sweep=optimizer.learning_rate=0.1")
  assert "give all values of a field in one flag" in error
