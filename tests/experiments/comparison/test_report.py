"""The results of trials, the report, its CSV files and its figures."""

import csv
import json
import math

import numpy as np
import pandas as pd
import pytest

from experiments.comparison import figures, report, results, runner
from experiments.comparison.statistics import Difference
from experiments.visualization import plots
from tests.experiments.comparison.trials import make_trials, write_results


@pytest.fixture
def no_figures(monkeypatch):
  """Draws nothing, which takes most of the time of a report."""
  monkeypatch.setattr(figures, "draw_all", lambda *_: [])


def write_report(trials, folder):
  """The report of complete trials."""
  return report_of([runner.Outcome(trial, None) for trial in trials], folder)


def report_of(outcomes, folder):
  found, failed = results.read_all(outcomes)
  path = report.write(
    found, failed, folder, command="", metric="sequence_accuracy"
  )
  return path.read_text()


def test_report_shows_means_differences_costs_and_failures(tmp_path):
  scores = {"none": 0.4, "general": 0.6, "dot": 0.9}
  trials = make_trials({"model.attention": list(scores)}, tmp_path, num_seeds=3)
  for trial in trials[:-1]:
    accuracy = scores[trial.group]
    write_results(trial, accuracy + 0.01 * trial.seed)
    assert trial.is_complete()
  outcomes = [runner.Outcome(trial, None) for trial in trials[:-1]]
  outcomes.append(runner.Outcome(trials[-1], "exit code 2: it broke"))
  path = report.write(
    *results.read_all(outcomes),
    tmp_path,
    command="compare this",
    metric="sequence_accuracy",
    others=["concat/seed-0"],
  )
  text = path.read_text()
  assert text.startswith("# reverse, by attention\n\n    compare this\n")
  assert "Other runs in this directory, not compared here: concat/seed" in text
  assert "## 1 of 9 trials failed" in text
  assert "- dot, seed 2: exit code 2: it broke" in text
  assert (
    "| none | 3 | 41.00% \u00b1 2.48% | 0.5900 \u00b1 0.0248 | \u2013 |" in text
  )
  assert "| dot | 2 | 90.50% (90.00% to 91.00%) |" in text
  assert "- dot is above none by 49.50 percentage points (p " in text
  assert "differences in alignment error rate (Welch" in text
  assert "- dot is below general by 29.50 percentage points (p " in text
  assert "below none" not in text
  assert "| none | \u2013 | \u2013 | \u2013 |\n" in text
  weights = "0.70 \u00b1 0.00 | 1.00 \u00b1 0.00 | 0.00% \u00b1 0.00%"
  assert f"| general | {weights} |\n" in text
  assert "| none | 1,000 | 2.5 | 1.0 | 1,024 |" in text
  for name in (
    "by_length",
    "curves",
    "curves_by_time",
    "costs",
    "attention_weights",
  ):
    assert (tmp_path / "figures" / f"{name}.png").stat().st_size > 5000
    assert f"(figures/{name}.png)" in text
  rows = list(
    csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
  )
  assert len(rows) == 8 * len(trials[0].splits)
  assert rows[0]["model.attention"] == "none"
  assert rows[0]["sequence_accuracy"] == "0.4"
  assert rows[0]["alignment_error_rate"] == rows[0]["largest_weight"] == ""
  assert rows[0]["parameters"] == "1000"
  curves = (tmp_path / "curves.csv").read_text().splitlines()
  assert len(curves) == 1 + 8
  assert curves[1] == "none,0,12,0.4,,"
  lengths = (tmp_path / "by_length.csv").read_text().splitlines()
  assert lengths[0].startswith("model.attention,seed,split,length,to_length,")
  assert "none,0,validation,1,4,,0.4,," in lengths
  assert len(lengths) == len(rows) + 1


def test_statistics_of_weights_leave_out_padding(tmp_path):
  weights = [[[0.5, 0.0, 0.0], [0.2, -0.1, 0.0]], [[0.3, 0.0, 0.2], [0.0] * 3]]
  panels = [
    plots.AttentionPanel(
      np.array(weights[0])[:, :2], ["a", "b"], ["c", "d"], ""
    ),
    plots.AttentionPanel(np.array(weights[1])[:1], ["a", "b", "c"], ["d"], ""),
  ]
  path = tmp_path / "weights.npz"
  plots.save_attention_weights(panels, path)
  assert results._weight_statistics(path) == pytest.approx(
    {
      "largest_weight": (0.5 + 0.2 + 0.3) / 3,
      "sum_of_weights": (0.5 + 0.1 + 0.5) / 3,
      "zero_weights": 2 / 7,
    }
  )


def test_values_that_are_not_finite_are_shown_and_not_tested(tmp_path):
  sweep = {"model.attention": ["none", "dot", "general"]}
  trials = make_trials(sweep, tmp_path, num_seeds=2)
  for trial, accuracy in zip(trials, (0.3, 0.4, math.nan, 0.5, 0.6, 0.7)):
    write_results(trial, accuracy)
  text = write_report(trials, tmp_path)
  assert "| dot | 2 | inf% (50.00% to inf%) | inf (" in text
  assert "Not tested, without two finite values: dot." in text
  assert "- general is above none by" in text or "No significant" in text
  assert "dot,0,test,inf,inf,inf," in (tmp_path / "results.csv").read_text()
  text = write_report(trials[:3], tmp_path)
  assert "Not tested, without two finite values: dot." in text
  assert "No significant" not in text


@pytest.mark.usefixtures("no_figures")
def test_metric_missing_for_some_seeds_shows_its_seed_count(tmp_path):
  trials = make_trials({"model.attention": ["dot"]}, tmp_path, num_seeds=3)
  for trial in trials:
    write_results(trial, 0.5 + 0.1 * trial.seed)
  path = trials[0].workdir / "eval" / "test.json"
  first = json.loads(path.read_text())
  del first["metrics"]["alignment_error_rate"]
  path.write_text(json.dumps(first))
  row = "| dot | 3 | 60.00% \u00b1 24.84% | 0.4000 \u00b1 0.2484 | 30.00%"
  assert f"{row} (25.00% to 35.00%) (n = 2) |" in write_report(trials, tmp_path)


@pytest.mark.usefixtures("no_figures")
def test_groups_with_different_source_lengths_have_no_length_table(tmp_path):
  trials = make_trials({"model.attention": ["none", "dot"]}, tmp_path)
  for trial, longest in zip(trials, (4, 5)):
    write_results(trial, 0.5, longest=longest)
  text = write_report(trials, tmp_path)
  assert "The source lengths differ between groups" in text
  assert "by length:" not in text


@pytest.mark.parametrize(
  "metric", ["token_accuracy", "teacher_forced_accuracy"]
)
@pytest.mark.usefixtures("no_figures")
def test_training_metrics_may_have_the_old_or_the_new_name(metric, tmp_path):
  trials = make_trials({"model.attention": ["dot"]}, tmp_path)
  write_results(trials[0], 0.5, train_metric=metric)
  assert "| dot | 1 | 50.00% |" in write_report(trials, tmp_path)
  curves = (tmp_path / "curves.csv").read_text().splitlines()
  assert curves[1:] == ["dot,0,12,0.5,,"]


@pytest.mark.parametrize("content", [None, b"", b"{}\n"])
@pytest.mark.usefixtures("no_figures")
def test_unreadable_results_fail_only_their_trial(content, tmp_path):
  trials = make_trials({"model.attention": ["dot", "general"]}, tmp_path)
  for trial in trials:
    write_results(trial, 0.5)
  timings = trials[0].workdir / "timings.jsonl"
  timings.unlink()
  if content is not None:
    timings.write_bytes(content)
  found, (failed,) = results.read_all(runner.run(trials, num_jobs=1))
  assert found.trials == trials[1:]
  assert "its results cannot be read" in failed.error
  assert "1 of 2 trials failed" in write_report(trials, tmp_path)


@pytest.mark.usefixtures("no_figures")
def test_a_run_of_another_config_is_reported_with_its_fields(tmp_path, capsys):
  trials = make_trials({"model.attention": ["dot", "general"]}, tmp_path)
  for trial in trials:
    write_results(trial, 0.5)
  config = trials[0].workdir / "config.json"
  raw = json.loads(config.read_text())
  raw["train"]["batch_size"] += 1
  config.write_text(json.dumps(raw))
  outcomes = runner.run(trials, num_jobs=1)
  assert "config.train.batch_size: stored" in capsys.readouterr().err
  assert [bool(each.error) for each in outcomes] == [True, False]
  lines = report_of(outcomes, tmp_path).splitlines()
  (line,) = [each for each in lines if "another config" in each]
  assert "; config.train.batch_size: stored" in line
  assert f"such as --workdir={tmp_path}-2;" in line


def test_training_time_adds_up_over_resumed_runs():
  lines = [
    {"step": 1, "first_step_seconds": 2.0},
    {"step": 10, "seconds": 5.0},
    {"step": 20, "seconds": 9.0},
    {"step": 21, "first_step_seconds": 2.0},
    {"step": 30, "seconds": 4.0},
    {"step": 31, "first_step_seconds": 2.0},
    {"step": 40, "seconds": 8.0},
  ]
  found = results._training_seconds(lines)
  assert found == {10: 5.0, 20: 9.0, 30: 13.0, 40: 21.0}


def test_every_figure_has_a_title_and_an_axis_of_zeros_no_negative_values(
  tmp_path, monkeypatch
):
  drawn = {}
  monkeypatch.setattr(
    plots, "save_figure", lambda figure, path: drawn.update({path: figure})
  )
  (trial,) = make_trials({"model.attention": ["dot"]}, tmp_path)
  write_results(trial, 0.0)
  found, _ = results.read_all([runner.Outcome(trial, None)])
  captions = figures.draw_all(found, "sequence_accuracy", tmp_path)
  for name, caption in captions:
    title = drawn[tmp_path / name].get_suptitle().replace("\n", " ")
    assert title == f"reverse: {caption}"
  for name in ("by_length.png", "curves.png"):
    assert drawn[tmp_path / name].axes[0].get_ylim() == (-0.03, 1.03)


@pytest.mark.parametrize(
  ("metric", "text"),
  [
    ("bleu", "a is above b by 1.50 points (p = 0.010)"),
    ("token_accuracy", "a is above b by 150.00 percentage points (p = 0.010)"),
    ("loss", "b is below a by 1.5000 (p = 0.010)"),
  ],
)
def test_a_difference_has_its_unit(metric, text):
  found = Difference("a", "b", 1.5, 0.01)
  assert report._in_words(found, metric) == text


def test_the_sentence_with_the_most_equal_predictions_is_drawn():
  predictions = [
    np.array([["a", "b"], ["c", ""]]),
    np.array([["a", ""], ["c", ""]]),
    np.array([["b", "b"], ["c", "d"]]),
  ]
  assert figures._most_agreed(predictions) == 1
  assert figures._most_agreed([each[::-1] for each in predictions]) == 0


def test_no_panel_of_lengths_repeats_another():
  ranges = {
    "test": range(1, 5),
    "test_5_to_6": range(5, 7),
    "test_up_to_6": range(1, 7),
    "validation": range(1, 5),
  }
  sets = {
    split: pd.DataFrame({"length": lengths})
    for split, lengths in ranges.items()
  }
  assert list(figures._without_repetition(sets)) == ["test", "test_5_to_6"]
  for split in ("validation", "test_up_to_6"):
    assert list(figures._without_repetition({split: sets[split]})) == [split]
