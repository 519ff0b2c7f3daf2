"""The report of a comparison: report.md, CSV files and the pictures."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.comparison import figures, results
from experiments.comparison.grid import Cell
from experiments.comparison.results import Result
from experiments.comparison.runner import Outcome
from experiments.comparison.statistics import (
  Difference,
  differences,
  interval,
  is_comparable,
)
from experiments.evaluation.report import pooled
from experiments.run_directory import write_text

_PERCENT = ("sequence_accuracy", "token_accuracy", "alignment_error_rate")
_NUM_BINS = 10
_LOWER_IS_BETTER = ("loss", "perplexity", "alignment_error_rate")


def write(
  found: Sequence[Result],
  failed: Sequence[Outcome],
  folder: Path,
  *,
  command: str,
  metric: str,
  left_out: Sequence[str] = (),
) -> Path:
  """Writes all there is to read.

  Args:
    found: results, one at least.
    failed: what came of the other cells.
    folder: of the comparison.
    command: that made it, for a reader.
    metric: what groups are compared by.
    left_out: runs that stand in the folder and are not compared.

  Returns:
    The report's path.

  Example:
    >>> write(found, [], folder, command="", metric="bleu")  # doctest: +SKIP
    PosixPath('runs/comparison/report.md')
  """
  results.write_tables(found, folder)
  lines = [f"# {_title(found[0].cell)}", "", f"    {command}", ""]
  if left_out:
    named = ", ".join(left_out)
    lines += [f"The command leaves out what stands here too: {named}.", ""]
  if failed:
    count = len(found) + len(failed)
    lines += [f"## {len(failed)} of {count} cells failed", ""]
    lines += [
      f"- {each.cell.group}, seed {each.cell.seed}: {_line(each.error)}"
      for each in failed
    ]
    lines.append("")
  lines += _scores(found, metric)
  drawn = figures.draw_all(results.by_group(found), metric, folder / "figures")
  lines += ["## Pictures", ""]
  lines += [f"![{caption}](figures/{name})\n" for name, caption in drawn]
  path = folder / "report.md"
  write_text(path, "\n".join(lines).rstrip() + "\n")
  return path


def _title(cell: Cell) -> str:
  """What was trained, and what it was compared by."""
  fields = [field.rpartition(".")[2] for field in cell.values]
  named = " and ".join(field.replace("_", " ") for field in fields)
  return f"{cell.raw['data']['name']}, by {named}"


def _line(error: str | None) -> str:
  return (error or "").split("\n")[0]


def _scores(found: Sequence[Result], metric: str) -> list[str]:
  """Tables of means with their intervals, set by set, and what differs."""
  groups = results.by_group(found)
  lines = [
    "Means over seeds, with 95% confidence intervals of Student's t for other"
    " seeds of training, judged on the same sets; n is the number of seeds.",
    "",
  ]
  for split in found[0].splits:
    lines += [f"## {split}", "", *_of_a_set(groups, split, metric)]
  lines += ["## How sharply they look", "", *_sharpness(groups)]
  return [*lines, "## What they cost", "", *_costs(groups)]


def _of_a_set(groups: figures.Groups, split: str, metric: str) -> list[str]:
  names = results.scores_of(
    [seed for seeds in groups.values() for seed in seeds]
  )
  lines = _table(
    ["", "n", *(name.replace("_", " ") for name in names)],
    [
      [
        group,
        str(len(seeds)),
        *(
          _mean(name, _values(seeds, split, name), of=len(seeds))
          for name in names
        ),
      ]
      for group, seeds in groups.items()
    ],
  )
  if metric in names:
    lines += _by_length(groups, split, metric)
  if all(len(seeds) < 2 for seeds in groups.values()):
    return [*lines, "One seed each: what differs by chance cannot be told.", ""]
  for name in dict.fromkeys((metric, "alignment_error_rate")):
    if name in names:
      lines += _differences(groups, split, name)
  return lines


def _sharpness(groups: figures.Groups) -> list[str]:
  weights = {
    group: _present(seed.largest_weight for seed in seeds)
    for group, seeds in groups.items()
  }
  return _table(
    ["", "largest weight of a row, in the pictures"],
    [
      [group, _mean("weight", weights[group], of=len(seeds))]
      for group, seeds in groups.items()
    ],
  )


def _costs(groups: figures.Groups) -> list[str]:
  return _table(
    ["", "parameters", "ms a step", "minutes of training", "peak MiB"],
    [
      [
        group,
        f"{seeds[0].num_parameters:,}",
        f"{_median(seeds, lambda seed: seed.step_milliseconds):.1f}",
        f"{_median(seeds, lambda seed: seed.seconds) / 60:.1f}",
        f"{_median(seeds, lambda seed: seed.peak_memory) / 2**20:,.0f}",
      ]
      for group, seeds in groups.items()
    ],
  )


def _by_length(groups: figures.Groups, split: str, metric: str) -> list[str]:
  """A table of means by the source's length."""
  rows = {
    group: [_bins(seed.splits[split]["by_length"]) for seed in seeds]
    for group, seeds in groups.items()
  }
  bins = next(iter(rows.values()))[0]
  if any(metric not in row for row in bins):
    return []
  ranges = {
    tuple((row["length"], row["to_length"]) for row in seed)
    for seeds in rows.values()
    for seed in seeds
  }
  if len(ranges) > 1:
    return ["Sources are not equally long in all groups: see the picture.", ""]
  head = [
    str(row["length"])
    if row["length"] == row["to_length"]
    else f"{row['length']}-{row['to_length']}"
    for row in bins
  ]
  means = [
    [
      group,
      *(
        _number(
          metric, statistics.fmean(float(seed[i][metric]) for seed in seeds)
        )
        for i in range(len(bins))
      ),
    ]
    for group, seeds in rows.items()
  ]
  return [f"{_named(metric)} by length:", "", *_table(["", *head], means)]


def _bins(rows: list[dict]) -> list[dict]:
  """Few enough to read in a line; those of text are few already."""
  return rows if len(rows) <= _NUM_BINS else pooled(rows, _NUM_BINS)


def _differences(groups: figures.Groups, split: str, metric: str) -> list[str]:
  """What differs significantly, in words."""
  values = {
    group: those
    for group, seeds in groups.items()
    if (those := _values(seeds, split, metric))
  }
  tested = [group for group in values if is_comparable(values[group])]
  left_out = ", ".join(group for group in values if group not in tested)
  lines = []
  if left_out:
    lines = [f"Without two finite values, not compared: {left_out}.", ""]
  if len(tested) < 2:
    return lines
  found = differences(values)
  if not found:
    return [*lines, f"No two differ significantly in {_named(metric)}.", ""]
  lines += [f"What differs in {_named(metric)} (Welch's test, Holm's levels):"]
  return [*lines, "", *(f"- {_words(each, metric)}" for each in found), ""]


def _words(each: Difference, metric: str) -> str:
  by = _number(metric, each.amount)
  sure = "p < 0.001" if each.p < 0.001 else f"p = {each.p:.3f}"
  if metric in _LOWER_IS_BETTER:
    return f"{each.worse} is below {each.better} by {by} ({sure})"
  return f"{each.better} is above {each.worse} by {by} ({sure})"


def _values(seeds: Sequence[Result], split: str, name: str) -> list[float]:
  return _present(seed.splits[split]["metrics"].get(name) for seed in seeds)


def _present(values: Iterable[float | None]) -> list[float]:
  return [value for value in values if value is not None]


def _median(seeds: Sequence[Result], of: Callable[[Result], float]) -> float:
  return statistics.median(map(of, seeds))


def _mean(name: str, values: Sequence[float], of: int) -> str:
  """A mean and its interval; and how many have it, if not all."""
  if not values:
    return "\u2013"
  found = interval(values)
  text = _number(name, found.mean)
  if not math.isnan(found.half_width):
    text += f" \u00b1 {_number(name, found.half_width)}"
  return text if len(values) == of else f"{text} (n = {len(values)})"


def _number(name: str, value: float) -> str:
  if name in _PERCENT:
    return f"{100 * value:.2f}%"
  return f"{value:.4f}" if name == "loss" else f"{value:.2f}"


def _named(metric: str) -> str:
  names = {"bleu": "BLEU", "chrf": "chrF"}
  return names.get(metric, metric.replace("_", " "))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
  lines = [head, ["---"] * len(head), *rows]
  return [*(f"| {' | '.join(line)} |" for line in lines), ""]
