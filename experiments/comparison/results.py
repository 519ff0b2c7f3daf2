"""Reads the results of complete trials into tables, and writes them as CSV."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.comparison.grid import UNREADABLE, Trial, text_of
from experiments.comparison.runner import Outcome
from experiments.training.metrics_writer import METRICS, TIMINGS

# The metrics that are compared, in the order of the columns.
SCORES = (
  "sequence_accuracy",
  "token_accuracy",
  "bleu",
  "chrf",
  "perplexity",
  "loss",
  "alignment_error_rate",
)
_COSTS = (
  "largest_weight",
  "sum_of_weights",
  "zero_weights",
  "parameters",
  "step_milliseconds",
  "seconds",
  "peak_memory",
)
_LENGTHS = ("length", "to_length", "count", "tokens")
Row = dict[str, Any]


class Results(NamedTuple):
  """The results of complete trials, in tables with NaN for absent values."""

  trials: list[Trial]
  scores: list[str]  # the metrics that the tables have
  # A row begins with the swept values, the group and the seed.
  splits: pd.DataFrame  # a row for each trial and evaluation set
  lengths: pd.DataFrame  # a row for each of their ranges of source lengths
  curves: pd.DataFrame  # a row for each trial and evaluation during training


def read_all(outcomes: Iterable[Outcome]) -> tuple[Results, list[Outcome]]:
  """Returns the results of complete trials, and the trials that failed."""
  trials, failed = [], []
  splits: list[Row] = []
  lengths: list[Row] = []
  curves: list[Row] = []
  for trial, error in outcomes:
    try:
      if error is None:
        found = _read(trial)
        for table, rows in zip((splits, lengths, curves), found):
          table += rows
        trials.append(trial)
    except UNREADABLE as damage:
      error = f"{trial.workdir}: its results cannot be read ({damage}); delete"
      error += " this directory to train it again"
    if error is not None:
      failed.append(Outcome(trial, error))
  keys = [*(trials[0].values if trials else ()), "group", "seed"]
  scores = [name for name in SCORES if any(name in row for row in splits)]
  return Results(
    trials,
    scores,
    pd.DataFrame(splits, columns=[*keys, "split", *scores, *_COSTS]),
    pd.DataFrame(lengths, columns=[*keys, "split", *_LENGTHS, *scores]),
    pd.DataFrame(curves, columns=[*keys, "step", "seconds", *scores]),
  ), failed


def groups(table: pd.DataFrame, by: str = "group") -> dict[str, pd.DataFrame]:
  """The rows of each group, in the order of the trials."""
  return {str(name): rows for name, rows in table.groupby(by, sort=False)}


def _read(trial: Trial) -> tuple[list[Row], list[Row], list[Row]]:
  """The rows of a trial in the tables of splits, lengths and curves."""
  values = {field: text_of(value) for field, value in trial.values.items()}
  keys = {**values, "group": trial.group, "seed": trial.seed}
  timings = _read_lines(trial.workdir / TIMINGS, "train")
  seconds = _training_seconds(timings)
  timings = [line for line in timings if "seconds" in line]
  costs = {
    **_weight_statistics(trial.attention_weights),
    "step_milliseconds": timings[-1]["step_milliseconds"],
    "seconds": max(seconds.values()),
    "peak_memory": max(line["peak_memory"] for line in timings),
  }
  splits, lengths = [], []
  for split in trial.splits:
    text = (trial.workdir / "eval" / f"{split}.json").read_text("utf-8")
    # In the tables, NaN is an absent value.
    found = json.loads(text, parse_constant=lambda _: math.inf)
    row = {**keys, "split": split}
    parameters = {"parameters": found["parameters"]}
    splits.append({**found["metrics"], **costs, **row, **parameters})
    lengths += [{**row, **each} for each in found["by_length"]]
  curves = [
    {**keys, **line, "seconds": seconds[line["step"]]}
    for line in _read_lines(trial.workdir / METRICS, "validation")
    if line["step"] in seconds
  ]
  return splits, lengths, curves


def _read_lines(path: Path, split: str) -> list[dict[str, Any]]:
  lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
  return [line for line in lines if line["split"] == split]


def _training_seconds(lines: Sequence[Mapping[str, float]]) -> dict[int, float]:
  """Seconds of training by step, summed over the restarts of a run."""
  seconds, before, last = {}, 0.0, 0.0
  for line in lines:
    if "first_step_seconds" in line:
      before, last = before + last, 0.0
    if "seconds" in line:
      last = line["seconds"]
      seconds[int(line["step"])] = before + last
  return seconds


def _weight_statistics(path: Path) -> dict[str, float]:
  """Means over target tokens of statistics of weights; empty without any."""
  arrays = np.load(path, allow_pickle=False)
  weights, is_target = arrays["weights"], arrays["target"] != ""
  is_pair = is_target[:, :, None] & (arrays["source"] != "")[:, None, :]
  if not weights.any():
    return {}
  return {
    "largest_weight": float(weights.max(-1)[is_target].mean()),
    "sum_of_weights": float(weights.sum(-1)[is_target].mean()),
    "zero_weights": float((weights == 0)[is_pair].mean()),
  }


def write_tables(results: Results, folder: Path) -> None:
  """Writes results.csv, curves.csv and by_length.csv."""
  for table, name, left_out in (
    (results.splits, "results", ["group"]),
    (results.curves, "curves", ["group", "seconds"]),
    (results.lengths, "by_length", ["group", "tokens"]),
  ):
    written = table.drop(columns=left_out)
    path = folder / f"{name}.csv"
    written.to_csv(path, index=False, lineterminator="\n")
