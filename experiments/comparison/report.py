"""Writes the report of a comparison: report.md, CSV files and figures."""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.comparison import figures
from experiments.comparison.results import Results, groups, write_tables
from experiments.comparison.runner import Outcome
from experiments.comparison.statistics import (
  Difference,
  differences,
  interval,
  is_testable,
)
from experiments.evaluation.metrics import CORPUS_NAMES
from experiments.evaluation.report import length_range, pooled
from experiments.run_directory import write_text

_PERCENT = (
  "sequence_accuracy",
  "token_accuracy",
  "alignment_error_rate",
  "zero_weights",
)
_LOWER_IS_BETTER = ("loss", "perplexity", "alignment_error_rate")
# Formats the rows of a group, by the title of a column.
Columns = dict[str, Callable[[pd.DataFrame], str]]


def write(
  results: Results,
  failed: Sequence[Outcome],
  folder: Path,
  *,
  command: str,
  metric: str,  # compared in figures and tests
  others: Sequence[str] = (),  # other runs in the folder
) -> Path:
  """Writes the report of at least one complete trial; returns its path."""
  write_tables(results, folder)
  lines = [f"# {_title(results)}", "", f"    {command}", ""]
  if others:
    names = ", ".join(others)
    lines += [f"Other runs in this directory, not compared here: {names}.", ""]
  if failed:
    count = len(results.trials) + len(failed)
    lines += [f"## {len(failed)} of {count} trials failed", ""]
    lines += [
      f"- {trial.name}: {'; '.join(map(str.strip, (error or '').splitlines()))}"
      for trial, error in failed
    ]
    lines.append("")
  lines += [
    "Means over training seeds with 95% confidence intervals (Student's t), or"
    " the range of two seeds; n is the number of seeds. The intervals are for"
    " further seeds on the same evaluation sets.",
    "",
  ]
  for split in groups(results.splits, "split"):
    lines += [f"## {split}", "", *_split(results, split, metric)]
  trials = results.splits.drop_duplicates(["group", "seed"])
  lines += ["## Attention weights", "", *_weights(trials)]
  lines += ["## Cost", "", *_costs(trials)]
  drawn = figures.draw_all(results, metric, folder / "figures")
  lines += ["## Figures", ""]
  lines += [f"![{caption}](figures/{name})\n" for name, caption in drawn]
  path = folder / "report.md"
  write_text(path, "\n".join(lines).rstrip() + "\n")
  return path


def _title(results: Results) -> str:
  """The name of the data, and the swept fields."""
  trial = results.trials[0]
  fields = [field.rpartition(".")[2] for field in trial.values]
  named = " and ".join(field.replace("_", " ") for field in fields)
  return f"{trial.raw['data']['name']}, by {named}"


def _split(results: Results, split: str, metric: str) -> list[str]:
  """The tables of an evaluation set, and its significant differences."""
  scores, lengths = results.scores, results.lengths
  table = groups(results.splits, "split")[split]
  columns: Columns = {"n": lambda rows: str(len(rows))}
  for name in scores:
    columns[figures.label(name)] = functools.partial(_mean, name)
  lines = _by_group(table, columns)
  if metric in scores:
    lines += _by_length(lengths[lengths["split"] == split], metric)
  if not table["group"].duplicated().any():
    return [*lines, "One seed per group: differences cannot be tested.", ""]
  for name in dict.fromkeys((metric, "alignment_error_rate")):
    if name in scores:
      lines += _differences(table, name)
  return lines


def _weights(table: pd.DataFrame) -> list[str]:
  """Statistics of the weights of a target token, averaged over tokens."""
  titles = {
    "largest_weight": "largest weight",
    "sum_of_weights": "sum of weights",
    "zero_weights": "weights that are 0",
  }
  columns: Columns = {
    title: functools.partial(_mean, name) for name, title in titles.items()
  }
  text = "Means over the target tokens of a few predictions:"
  return [text, "", *_by_group(table, columns)]


def _costs(table: pd.DataFrame) -> list[str]:
  columns: Columns = {
    "parameters": lambda rows: f"{rows['parameters'].iloc[0]:,}",
    "ms per step": lambda rows: f"{rows['step_milliseconds'].median():.1f}",
    "minutes of training": lambda rows: f"{rows['seconds'].median() / 60:.1f}",
    "peak MiB": lambda rows: f"{rows['peak_memory'].median() / 2**20:,.0f}",
  }
  return _by_group(table, columns)


def _by_length(lengths: pd.DataFrame, metric: str) -> list[str]:
  """A table of means by source length, in at most ten ranges."""
  scores: list[dict[str, Any]] = []
  for (group, _), rows in lengths.groupby(["group", "seed"], sort=False):
    present: Any = rows.dropna(axis="columns", how="all")
    ranges = pooled(present.to_dict("records"))
    if any(metric not in each for each in ranges):
      return []
    by_range = {length_range(each): each[metric] for each in ranges}
    scores.append({"group": group, **by_range})
  if any(each.keys() != scores[0].keys() for each in scores):
    return ["The source lengths differ between groups: see the figure.", ""]
  columns: Columns = {
    title: functools.partial(_plain_mean, metric, title)
    for title in list(scores[0])[1:]
  }
  lines = _by_group(pd.DataFrame(scores), columns)
  return [f"{figures.label(metric)} by length:", "", *lines]


def _differences(table: pd.DataFrame, metric: str) -> list[str]:
  """The significant differences between groups in a metric, as text."""
  scored = groups(table.dropna(subset=metric))
  values = {group: rows[metric].tolist() for group, rows in scored.items()}
  untested = [group for group in values if not is_testable(values[group])]
  lines = []
  if untested:
    names = ", ".join(untested)
    lines = [f"Not tested, without two finite values: {names}.", ""]
  if len(values) - len(untested) < 2:
    return lines
  found, name = differences(values), figures.label(metric)
  if not found:
    return [*lines, f"No significant differences in {name}.", ""]
  return [
    *lines,
    f"Significant differences in {name} (Welch's test with Holm's correction,"
    " p < 0.05):",
    "",
    *(f"- {_in_words(each, metric)}" for each in found),
    "",
  ]


def _in_words(difference: Difference, metric: str) -> str:
  higher, lower, amount, p = difference
  p_text = "p < 0.001" if p < 0.001 else f"p = {p:.3f}"
  unit = " points" if metric in CORPUS_NAMES else ""
  text = f"{_number(metric, amount)}{unit}".replace("%", " percentage points")
  by = f"by {text} ({p_text})"
  if metric in _LOWER_IS_BETTER:
    return f"{lower} is below {higher} {by}"
  return f"{higher} is above {lower} {by}"


def _by_group(table: pd.DataFrame, columns: Columns) -> list[str]:
  """A Markdown table with a row for each group."""
  lines = [["", *columns], ["---"] * (1 + len(columns))]
  for group, rows in groups(table).items():
    lines.append([group, *(text(rows) for text in columns.values())])
  return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _mean(name: str, rows: pd.DataFrame) -> str:
  """The mean with its interval or range; n if some seeds lack the metric."""
  values = rows[name].dropna().tolist()
  if not values:
    return "\u2013"
  mean, half_width = interval(values)
  text = _number(name, mean)
  if not math.isnan(half_width):
    text += f" \u00b1 {_number(name, half_width)}"
  elif len(values) == 2:
    text += f" ({_number(name, min(values))} to {_number(name, max(values))})"
  return text if len(values) == len(rows) else f"{text} (n = {len(values)})"


def _plain_mean(metric: str, column: str, rows: pd.DataFrame) -> str:
  return _number(metric, rows[column].mean())


def _number(name: str, value: float) -> str:
  if name in _PERCENT:
    return f"{100 * value:.2f}%"
  return f"{value:.4f}" if name == "loss" else f"{value:.2f}"
