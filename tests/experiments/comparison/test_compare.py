"""Comparing runs: the grid, its processes, its statistics, its report."""

import csv
import json
import math
import signal
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from configs import base
from experiments.comparison import (
  figures,
  grid,
  report,
  results,
  runner,
)
from experiments.comparison import statistics as our_statistics
from experiments.errors import UserError
from experiments.visualization import plots
from tests.experiments import processes
from tests.experiments.conftest import make_tiny


def make_grid(sweeps, folder=Path("c"), num_seeds=1, config=None):
  return grid.grid(
    config or make_tiny(),
    sweeps,
    num_seeds=num_seeds,
    folder=folder,
    flags=["--config=tiny.py"],
  )


def test_every_combination_gets_every_seed_and_a_directory_of_its_own():
  found = grid(
    {"model.attention": ["none", "dot"], "model.input_feeding": ["true"]},
    num_seeds=3,
  )
  assert [cell.seed for cell in found] == [0, 1, 2] * 2
  assert len({cell.workdir for cell in found}) == 6
  assert {cell.group for cell in found} == {
    "none, input_feeding=true",
    "dot, input_feeding=true",
  }
  last = found[-1]
  assert last.raw["model"]["attention"] == "dot"
  assert last.raw["model"]["input_feeding"] is True
  assert last.raw["seed"] == 2
  assert "--config.model.input_feeding=true" in last.command
  assert f"--workdir={last.workdir}" in last.command


@pytest.mark.parametrize(
  ("sweeps", "message"),
  [
    ({"model.attention": ["none", "dto"]}, "config.model.attention"),
    ({"model.atention": ["none"]}, "--sweep=model.atention: the config has no"),
    ({"train.steps": ["many"]}, "got 'many', but the field holds int"),
    ({"model.input_feeding": ["1"]}, "the field holds bool, such as false"),
    ({"model.attention": ["dot", "dot"]}, "dot is to be compared with itself"),
    ({"optimizer.learning_rate": ["1e-3", "0.001"]}, "learning_rate=0.001 is"),
    ({"seed": ["1", "2"]}, "give the number of seeds by --seeds"),
  ],
)
def test_what_cannot_be_swept_is_told_before_anything_is_trained(
  sweeps, message
):
  with pytest.raises(UserError, match=message):
    make_grid(sweeps)


@pytest.mark.parametrize("text", ["model.order", "=a,b", "seed=", "seed=1,"])
def test_a_sweep_is_a_field_and_its_values(text):
  with pytest.raises(UserError, match="--sweep="):
    grid.parse_sweep(text)


def test_scores_are_those_of_the_model():
  assert grid.score_field(base.get_config("dot")) == "model.attention"
  assert grid.score_field(base.get_config("transformer")) == "model.score"


def test_an_interval_holds_the_mean_in_19_of_20_samples():
  rng = np.random.default_rng(0)
  held = 0
  for _ in range(400):
    found = our_statistics.interval(list(rng.normal(3.0, 2.0, 5)))
    held += abs(found.mean - 3.0) <= found.half_width
  assert 0.92 < held / 400 < 0.98


def test_an_interval_of_a_textbook():
  values = [4.2, 5.1, 3.9, 4.8]
  low, high = stats.t.interval(
    0.95, 3, loc=statistics.fmean(values), scale=stats.sem(values)
  )
  found = our_statistics.interval(values)
  assert found.mean - found.half_width == pytest.approx(low)
  assert found.mean + found.half_width == pytest.approx(high)
  assert math.isnan(our_statistics.interval([1.0]).half_width)


def test_levels_are_adjusted_for_the_number_of_pairs():
  rng = np.random.default_rng(1)
  false = 0
  for _ in range(200):
    groups = {name: list(rng.normal(size=5)) for name in "abcdef"}
    false += bool(our_statistics.differences(groups))
  assert false / 200 < 0.1  # of fifteen pairs unadjusted it would be a half
  groups = {"a": [1.0, 1.1, 0.9], "b": [9.0, 9.1, 8.9], "c": [1.0, 1.2, 0.9]}
  found = our_statistics.differences(groups)
  assert {(each.better, each.worse) for each in found} == {
    ("b", "a"),
    ("b", "c"),
  }


def test_groups_without_spread_differ_as_far_as_their_number_can_tell():
  found = our_statistics.differences({"a": [1.0] * 5, "b": [0.5] * 5})
  exact = stats.permutation_test(
    ([1.0] * 5, [0.5] * 5), lambda one, other: np.mean(one) - np.mean(other)
  )
  assert found[0].p == pytest.approx(exact.pvalue)
  assert not our_statistics.differences({"a": [1.0] * 2, "b": [0.5] * 2})
  assert not our_statistics.differences({"a": [1.0] * 5, "b": [1.0] * 5})


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_compared_and_spoils_nothing(bad):
  assert math.isnan(our_statistics.interval([bad, 1.0, 2.0]).half_width)
  groups = {"a": [bad, 1, 2], "b": [1.0, 1.1, 0.9], "c": [9.0, 9.1, 8.9]}
  found = our_statistics.differences(groups)
  assert [(each.better, each.worse) for each in found] == [("c", "b")]


def test_the_clock_goes_on_where_a_run_was_resumed():
  lines = [
    {"step": 1, "first_step_seconds": 2.0},
    {"step": 10, "seconds": 5.0},
    {"step": 20, "seconds": 9.0},
    {"step": 21, "first_step_seconds": 2.0},
    {"step": 30, "seconds": 4.0},
    {"step": 31, "first_step_seconds": 2.0},
    {"step": 40, "seconds": 8.0},
  ]
  assert results._clock(lines) == {10: 5.0, 20: 9.0, 30: 13.0, 40: 21.0}


def leave_results(cell, accuracy, beam_size=1, longest=4):
  """What a trained cell leaves."""
  for split in cell.splits:
    path = cell.workdir / "eval" / f"{split}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"length": 1, "to_length": longest, "sequence_accuracy": accuracy}
    metrics = {"sequence_accuracy": accuracy, "loss": 1 - accuracy}
    if cell.group != "none":
      metrics["alignment_error_rate"] = 0.95 - accuracy
    found = {"metrics": metrics, "by_length": [row], "parameters": 1000}
    found["search"] = {"beam_size": beam_size}
    path.write_text(json.dumps(found))
  line = {"step": 12, "split": "validation", "sequence_accuracy": accuracy}
  (cell.workdir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
  line = {"step": 12, "split": "train", "seconds": 60.0}
  line |= {"step_milliseconds": 2.5, "peak_memory": 2**30}
  (cell.workdir / "timings.jsonl").write_text(json.dumps(line) + "\n")
  (cell.workdir / "config.json").write_text(json.dumps(cell.raw))
  weights = (cell.group != "none") * np.array([[0.8, 0.2], [0.4, 0.6]])
  panel = plots.AttentionPanel(weights, ["a", "b"], ["b", "a"], "")
  plots.save_attention_weights([panel], cell.looks)


def test_a_report_tells_means_differences_costs_and_failures(tmp_path):
  scores = {"none": 0.4, "general": 0.6, "dot": 0.9}
  found = make_grid({"model.attention": list(scores)}, tmp_path, num_seeds=3)
  for cell in found[:-1]:
    accuracy = scores[cell.group]
    leave_results(cell, accuracy + 0.01 * cell.seed)
    assert cell.is_complete()
  outcomes = [runner.Outcome(cell, None) for cell in found[:-1]]
  outcomes.append(runner.Outcome(found[-1], "exit code 2: it broke"))
  path = report.write(
    *results.read_all(outcomes),
    tmp_path,
    command="compare this",
    metric="sequence_accuracy",
    left_out=["concat/seed-0"],
  )
  text = path.read_text()
  assert text.startswith("# reverse, by attention\n\n    compare this\n")
  assert "leaves out what stands here too: concat/seed-0." in text
  assert "- dot, seed 2: exit code 2: it broke" in text
  assert (
    "| none | 3 | 41.00% \u00b1 2.48% | 0.5900 \u00b1 0.0248 | \u2013 |" in text
  )
  assert "| dot | 2 | 90.50% \u00b1 6.35% |" in text
  assert "- dot is above none by 49.50% (p " in text
  assert "differs in alignment error rate (Welch" in text
  assert "- dot is below general by 29.50% (p " in text
  assert "below none" not in text
  assert "| none | \u2013 |\n" in text
  assert "| dot | 0.70 \u00b1 0.00 |\n" in text
  assert "| none | 1,000 | 2.5 | 1.0 | 1,024 |" in text
  for name in ("by_length", "curves", "clock", "costs", "alignments"):
    assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 5000
  rows = list(
    csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
  )
  assert len(rows) == 8 * len(found[0].splits)
  assert rows[0]["model.attention"] == "none"
  assert float(rows[0]["sequence_accuracy"]) == 0.4
  assert rows[0]["alignment_error_rate"] == rows[0]["largest_weight"] == ""
  curves = (tmp_path / "curves.csv").read_text().splitlines()
  assert len(curves) == 1 + 8
  assert curves[1].startswith("none,0,12,0.4,")
  lengths = (tmp_path / "by_length.csv").read_text().splitlines()
  assert lengths[0].startswith("model.attention,seed,split,length,to_length,")
  assert "none,0,validation,1,4,,0.4,," in lengths
  assert len(lengths) == len(rows) + 1


def written(found, folder):
  """The report of cells that are all complete."""
  outcomes = [runner.Outcome(cell, None) for cell in found]
  found, failed = results.read_all(outcomes)
  path = report.write(
    found, failed, folder, command="", metric="sequence_accuracy"
  )
  return path.read_text()


def test_a_report_says_what_it_cannot_compare(tmp_path):
  sweep = {"model.attention": ["none", "dot", "general"]}
  found = make_grid(sweep, tmp_path, num_seeds=2)
  for cell, accuracy in zip(found, (0.3, 0.4, math.nan, 0.5, 0.6, 0.7)):
    leave_results(cell, accuracy)
  text = written(found, tmp_path)
  assert "| dot | 2 | nan% | nan" in text
  assert "Without two finite values, not compared: dot." in text
  assert "- general is above none by" in text or "No two differ" in text
  text = written(found[:3], tmp_path)
  assert "Without two finite values, not compared: dot." in text
  assert "No two differ" not in text


def test_a_metric_that_some_seeds_lack_tells_of_how_many_it_is(tmp_path):
  found = make_grid({"model.attention": ["dot"]}, tmp_path, num_seeds=3)
  for cell in found:
    leave_results(cell, 0.5 + 0.1 * cell.seed)
  path = found[0].workdir / "eval" / "test.json"
  first = json.loads(path.read_text())
  del first["metrics"]["alignment_error_rate"]
  path.write_text(json.dumps(first))
  row = "| dot | 3 | 60.00% \u00b1 24.84% | 0.4000 \u00b1 0.2484 | 30.00%"
  assert f"{row} \u00b1 63.53% (n = 2) |" in written(found, tmp_path)


def test_lengths_that_differ_between_groups_are_not_put_in_one_table(tmp_path):
  found = make_grid({"model.attention": ["none", "dot"]}, tmp_path)
  for cell, longest in zip(found, (4, 5)):
    leave_results(cell, 0.5, longest=longest)
  text = written(found, tmp_path)
  assert "Sources are not equally long in all groups" in text
  assert "by length:" not in text


def test_a_cell_that_was_evaluated_otherwise_is_not_complete(tmp_path):
  (cell,) = make_grid({"model.attention": ["dot"]}, tmp_path)
  leave_results(cell, 0.5)
  assert cell.is_complete()
  leave_results(cell, 0.5, beam_size=5)
  assert not cell.is_complete()


@pytest.mark.parametrize(
  "place", ["eval/test.json", "figures/alignments_validation.npz"]
)
@pytest.mark.parametrize("content", [b"", b"{"])
def test_what_training_leaves_again_may_be_damaged(place, content, tmp_path):
  (cell,) = make_grid({"model.attention": ["dot"]}, tmp_path)
  leave_results(cell, 0.5)
  (cell.workdir / place).write_bytes(content)
  assert not cell.is_complete()


@pytest.mark.parametrize("content", [None, b"", b"{}\n"])
def test_a_cell_that_cannot_be_read_fails_alone(content, tmp_path):
  found = make_grid({"model.attention": ["dot", "general"]}, tmp_path)
  for cell in found:
    leave_results(cell, 0.5)
  timings = found[0].workdir / "timings.jsonl"
  timings.unlink()
  if content is not None:
    timings.write_bytes(content)
  outcomes = runner.run(found, num_jobs=1)
  (read,), (failed,) = results.read_all(outcomes)
  assert read.cell == found[1]
  assert "its results cannot be read" in failed.error
  assert "1 of 2 cells failed" in written(found, tmp_path)


def test_a_cell_without_a_place_fails_alone(tmp_path):
  found = make_grid({"model.attention": ["dot", "general"]}, tmp_path)
  (tmp_path / "dot").write_text("")
  leave_results(found[1], 0.5)
  first, second = runner.run(found, num_jobs=1)
  assert f"{found[0].workdir}: " in first.error
  assert second.error is None


def test_what_stands_there_and_is_not_compared_is_told(tmp_path):
  found = make_grid(
    {"model.attention": ["dot", "general"]}, tmp_path, num_seeds=2
  )
  for cell in found:
    leave_results(cell, 0.5)
  left = grid.left_out(found[:1], tmp_path)
  assert left == ["dot/seed-1", "general/seed-0", "general/seed-1"]
  assert not grid.left_out(found, tmp_path)


def test_fields_of_one_name_keep_their_sections():
  fields = {"data.source_tokenizer.kind": "words", "data.name": "text"}
  assert grid.group_name(fields) == "kind=words, name=text"
  fields["data.target_tokenizer.kind"] = "bpe"
  assert grid.group_name(fields) == (
    "data.source_tokenizer.kind=words, name=text,"
    " data.target_tokenizer.kind=bpe"
  )


def test_one_group_may_have_no_spread():
  solved = {"dot": [1.0, 1.0, 1.0], "none": [0.5, 0.6, 0.55]}
  (found,) = our_statistics.differences(solved)
  assert (found.better, found.worse) == ("dot", "none")


def test_what_an_earlier_attempt_said_is_not_why_the_last_one_failed(tmp_path):
  (cell,) = make_grid({"model.attention": ["dot"]}, tmp_path)
  script = "import os, sys; print('error: one'); sys.exit(2)"
  for code, why in ((script, "error: one"), ("import os; os.abort()", "said")):
    process, attempt = runner._start(
      cell._replace(command=(sys.executable, "-c", code))
    )
    process.wait()
    assert why in runner._outcome(attempt, process.returncode).error


def test_should_it_fail_itself_none_is_left_behind(tmp_path, monkeypatch):
  (cell,) = make_grid({"model.attention": ["dot"]}, tmp_path)
  code = "import time; time.sleep(600)"
  sleeping = cell._replace(command=(sys.executable, "-c", code))
  started = []

  def look(_, attempts):
    raise OSError(f"no terminal any more, of {len(list(attempts))}")

  start = runner._start
  monkeypatch.setattr(runner._Overview, "look", look)
  monkeypatch.setattr(
    runner, "_start", lambda cell: started.append(start(cell)) or started[-1]
  )
  with pytest.raises(OSError, match="no terminal any more, of 1"):
    runner.run([sleeping], num_jobs=1)
  assert started[0][0].wait(timeout=10) == -signal.SIGTERM


def test_the_sentence_that_most_answer_alike_is_shown():
  answers = [
    np.array([["a", "b"], ["c", ""]]),
    np.array([["a", ""], ["c", ""]]),
    np.array([["b", "b"], ["c", "d"]]),
  ]
  assert figures._most_agreed(answers) == 1
  assert figures._most_agreed([each[::-1] for each in answers]) == 0


def test_a_directory_of_another_config_fails_alone(tmp_path):
  (cell,) = make_grid({"model.attention": ["dot"]}, tmp_path)
  leave_results(cell, 0.5)
  raw = {**cell.raw, "seed": 7}
  (cell.workdir / "config.json").write_text(json.dumps(raw))
  (outcome,) = runner.run([cell], num_jobs=1)
  assert "config.seed: 7 there, 0 here" in outcome.error


@pytest.mark.slow
def test_cells_are_trained_a_failure_stops_none_and_nothing_is_lost(tmp_path):
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
  deadline = time.monotonic() + 120
  while not (second / "metrics.jsonl").exists():
    assert process.poll() is None
    assert time.monotonic() < deadline
    time.sleep(0.01)
  process.send_signal(signal.SIGINT)
  _, error = process.communicate(timeout=60)
  assert process.returncode == 75, error
  assert "learning_rate=1e+30, seed 0: exit code 2: error: step" in error
  assert "the same command goes on" in error
  code, out, error = processes.run(*arguments)
  assert code == 1, error  # since one cell fails again
  assert "1 of 2 cells failed" in out
  assert "| learning_rate=0.01 | 1 |" in out
  assert (folder / "report.md").exists()
  before = (folder / "report.md").read_text()
  code, out, error = processes.run(*arguments, "--config.train.steps=11")
  assert code == 2
  assert "every cell failed, so no report is written" in error
  assert "config.train.steps: 12 there, 11 here" in error
  assert (folder / "report.md").read_text() == before
  code, out, error = processes.run(
    "compare", f"--config={config}", *arguments[-1:]
  )
  assert code == 2
  assert "nothing to compare" in error
  code, out, error = processes.run(
    *arguments, "--sweep=optimizer.learning_rate=0.1"
  )
  assert code == 2
  assert "give all values of a field in one flag" in error
