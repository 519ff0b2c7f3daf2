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
_BINS = ("length", "to_length", "count")


class Results(NamedTuple):
  """The results of complete trials; absent values are None, NaN is NaN.

  Attributes:
    trials: that are complete.
    scores: the names of the metrics that the tables have.
    splits: a row for each trial and evaluation set; its scores, costs, largest
      attention weight, and `bins`, the rows of its metrics by source length.
    curves: a row for each trial and evaluation during training.
  """

  trials: list[Trial]
  scores: list[str]
  splits: pd.DataFrame
  curves: pd.DataFrame


def read_all(outcomes: Iterable[Outcome]) -> tuple[Results, list[Outcome]]:
  """Reads the complete trials; also returns those that failed."""
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
  found = Results(
    trials,
    scores,
    _table(splits, [*_KEYS, "split", *scores, *_COSTS, "bins"]),
    _table(curves, [*_KEYS, "step", "seconds", *scores]),
  )
  return found, failed


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
  """The values that are not None; NaN stays."""
  return [value for value in values if value is not None]


def _read(trial: Trial) -> tuple[list[dict], list[dict]]:
  """A trial's rows of the two tables."""
  keys = {"group": trial.group, "seed": trial.seed}
  timings = _read_lines(trial.workdir / TIMINGS, "train")
  seconds = _training_seconds(timings)
  timings = [line for line in timings if "seconds" in line]
  costs = {
    "largest_weight": _largest_weight(trial.attention_weights),
    "step_milliseconds": timings[-1]["step_milliseconds"],
    "seconds": max(seconds.values()),
    "peak_memory": max(line["peak_memory"] for line in timings),
  }
  splits = []
  for split in trial.splits:
    path = trial.workdir / "eval" / f"{split}.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    splits.append(
      {
        **keys,
        "split": split,
        **found["metrics"],
        **costs,
        "parameters": found["parameters"],
        "bins": found["by_length"],
      }
    )
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
  """Seconds of training by step, where a resumed run counts from 0 again."""
  seconds, before, last = {}, 0.0, 0.0
  for line in lines:
    if "first_step_seconds" in line:
      before, last = before + last, 0.0
    if "seconds" in line:
      last = line["seconds"]
      seconds[int(line["step"])] = before + last
  return seconds


def _largest_weight(path: Path) -> float | None:
  """The largest attention weight of a token, on average; None without any."""
  arrays = np.load(path, allow_pickle=False)
  largest = np.concatenate(
    [
      weights[: np.count_nonzero(target)].max(-1)
      for weights, target in zip(arrays["weights"], arrays["target"])
    ]
  )
  return float(largest.mean()) if largest.any() else None


def write_tables(results: Results, folder: Path) -> None:
  """Writes results.csv, curves.csv and by_length.csv.

  They have a row for each trial and evaluation set; for each evaluation of the
  validation set during training; for each evaluation set and range of lengths.
  """
  scores = results.scores
  columns = ["split", *scores, *_COSTS]
  _write(results, results.splits, columns, folder / "results.csv")
  _write(results, results.curves, ["step", *scores], folder / "curves.csv")
  columns = ["split", *_BINS, *scores]
  keys = results.splits[[*_KEYS, "split"]].to_dict("records")
  rows = [
    {**key, **bin}
    for key, bins in zip(keys, results.splits["bins"])
    for bin in bins
  ]
  bins = _table(rows, [*_KEYS, *columns])
  _write(results, bins, columns, folder / "by_length.csv")


def _write(
  results: Results, table: pd.DataFrame, columns: Sequence[str], path: Path
) -> None:
  """Writes columns of a table, after the swept values and the seed."""
  values = {trial.group: trial.values for trial in results.trials}
  written = table[["seed", *columns]].copy()
  for index, field in enumerate(results.trials[0].values):
    texts = {group: text_of(each[field]) for group, each in values.items()}
    written.insert(index, field, table["group"].map(texts))
  # Pandas would write NaN as "", as it does None.
  written = written.map(lambda value: "nan" if value != value else value)
  written.to_csv(path, index=False, lineterminator="\n")
