"""Reads the results of complete trials into tables, and writes them as CSV."""

import json
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
  "parameters",
  "step_milliseconds",
  "seconds",
  "peak_memory",
)
_KEYS = ("group", "seed")


class Results(NamedTuple):
  """The results of complete trials; absent values are None, and not NaN."""

  trials: list[Trial]
  scores: list[str]  # the metrics that the tables have
  # A row for each trial and evaluation set: scores, costs, and "bins", which
  # holds the metrics by source length.
  splits: pd.DataFrame
  curves: pd.DataFrame  # a row for each trial and evaluation during training


def read_all(outcomes: Iterable[Outcome]) -> tuple[Results, list[Outcome]]:
  """Returns the results of complete trials, and the trials that failed."""
  trials, failed = [], []
  splits: list[dict[str, Any]] = []
  curves: list[dict[str, Any]] = []
  for trial, error in outcomes:
    try:
      if error is None:
        rows, points = _read(trial)
        trials.append(trial)
        splits += rows
        curves += points
    except UNREADABLE as damage:
      error = f"{trial.workdir}: its results cannot be read ({damage}); delete"
      error += " this directory to train it again"
    if error is not None:
      failed.append(Outcome(trial, error))
  scores = [name for name in SCORES if any(name in row for row in splits)]
  split_table = _table(splits, [*_KEYS, "split", *scores, *_COSTS, "bins"])
  curve_table = _table(curves, [*_KEYS, "step", "seconds", *scores])
  return Results(trials, scores, split_table, curve_table), failed


def _table(
  rows: Iterable[Mapping[str, Any]], columns: Sequence[str]
) -> pd.DataFrame:
  """A table with None for absent values, which is distinct from NaN."""
  values: Any = [[row.get(column) for column in columns] for row in rows]
  return pd.DataFrame(values, columns=list(columns), dtype=object)


def groups(table: pd.DataFrame, by: str = "group") -> dict[str, pd.DataFrame]:
  """The rows of each group, in the order of the trials."""
  return {str(name): rows for name, rows in table.groupby(by, sort=False)}


def present(values: Iterable[Any]) -> list[Any]:
  """The values that are not None, NaN included."""
  return [value for value in values if value is not None]


def _read(trial: Trial) -> tuple[list[dict], list[dict]]:
  """The rows of a trial in the tables of splits and of curves."""
  keys = {"group": trial.group, "seed": trial.seed}
  timings = _read_lines(trial.workdir / TIMINGS, "train")
  seconds = _training_seconds(timings)
  timings = [line for line in timings if "seconds" in line]
  common = {
    **keys,
    "largest_weight": _largest_weight(trial.attention_weights),
    "step_milliseconds": timings[-1]["step_milliseconds"],
    "seconds": max(seconds.values()),
    "peak_memory": max(line["peak_memory"] for line in timings),
  }
  splits = []
  for split in trial.splits:
    path = trial.workdir / "eval" / f"{split}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    row = {"split": split, "parameters": found["parameters"]}
    row["bins"] = found["by_length"]
    splits.append({**found["metrics"], **common, **row})
  curves = [
    {**keys, **line, "seconds": seconds[line["step"]]}
    for line in _read_lines(trial.workdir / METRICS, "validation")
    if line["step"] in seconds
  ]
  return splits, curves


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


def _largest_weight(path: Path) -> float | None:
  """The mean over target tokens of the largest weight; None without any."""
  arrays = np.load(path, allow_pickle=False)
  largest = arrays["weights"].max(-1)[arrays["target"] != ""]
  return float(largest.mean()) if largest.any() else None


def write_tables(results: Results, folder: Path) -> None:
  """Writes results.csv, curves.csv and by_length.csv."""
  scores = results.scores
  columns = ["split", *scores, *_COSTS]
  _write(results, results.splits, columns, folder / "results.csv")
  _write(results, results.curves, ["step", *scores], folder / "curves.csv")
  columns = ["split", "length", "to_length", "count", *scores]
  rows = [
    {**row, **bin}
    for row in results.splits[[*_KEYS, "split", "bins"]].to_dict("records")
    for bin in row["bins"]
  ]
  bins = _table(rows, [*_KEYS, *columns])
  _write(results, bins, columns, folder / "by_length.csv")


def _write(
  results: Results, table: pd.DataFrame, columns: Sequence[str], path: Path
) -> None:
  """Writes the swept values, the seed, and some columns of a table."""
  values = {trial.group: trial.values for trial in results.trials}
  written = table[["seed", *columns]].copy()
  for index, field in enumerate(results.trials[0].values):
    texts = {group: text_of(each[field]) for group, each in values.items()}
    written.insert(index, field, table["group"].map(texts))
  # Pandas would write NaN as "", as it does None.
  written = written.map(lambda value: "nan" if value != value else value)
  written.to_csv(path, index=False, lineterminator="\n")
