"""What the cells of a comparison have left, read again and put together."""

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.comparison.grid import UNREADABLE, Cell, text_of
from experiments.comparison.runner import Outcome
from experiments.training.metrics_writer import METRICS, TIMINGS

# In this order, where a run has them.
SCORES = (
  "sequence_accuracy",
  "token_accuracy",
  "bleu",
  "chrf",
  "perplexity",
  "loss",
  "alignment_error_rate",
)


class Result(NamedTuple):
  """A cell that is complete.

  Attributes:
    cell: which.
    splits: eval/SPLIT.json of each set.
    curve: metrics of the validation set, step by step, and with the seconds
      that training had taken.
    num_parameters: of the model.
    step_milliseconds: of a usual step.
    seconds: of training, evaluations on the way included.
    peak_memory: bytes.
    largest_weight: of a row of attention weights, on average over the run's
      pictures; None if it looks nowhere.
  """

  cell: Cell
  splits: dict[str, dict[str, Any]]
  curve: list[dict[str, float]]
  num_parameters: int
  step_milliseconds: float
  seconds: float
  peak_memory: float
  largest_weight: float | None


def read_all(
  outcomes: Iterable[Outcome],
) -> tuple[list[Result], list[Outcome]]:
  """Reads what complete cells have left.

  Args:
    outcomes: of every cell.

  Returns:
    The results; and the outcomes of cells that failed, or whose results cannot
    be read.

  Example:
    >>> read_all([])
    ([], [])
  """
  found, failed = [], []
  for outcome in outcomes:
    if outcome.error:
      failed.append(outcome)
      continue
    try:
      found.append(_read(outcome.cell))
    except UNREADABLE as error:
      why = f"its results cannot be read ({error}); remove it to train it again"
      failed.append(Outcome(outcome.cell, f"{outcome.cell.workdir}: {why}"))
  return found, failed


def _read(cell: Cell) -> Result:
  """What a complete cell has left."""
  splits = {
    name: json.loads((cell.workdir / "eval" / f"{name}.json").read_text())
    for name in cell.splits
  }
  lines = [
    line for line in _lines(cell.workdir / TIMINGS) if line["split"] == "train"
  ]
  clock = _clock(lines)
  timings = [line for line in lines if "seconds" in line]
  curve = [
    {**line, "seconds": clock[line["step"]]}
    for line in _lines(cell.workdir / METRICS)
    if line["split"] == "validation" and line["step"] in clock
  ]
  return Result(
    cell,
    splits,
    curve,
    num_parameters=splits["validation"]["parameters"],
    step_milliseconds=timings[-1]["step_milliseconds"],
    seconds=max(clock.values()),
    peak_memory=max(line["peak_memory"] for line in timings),
    largest_weight=_largest_weight(cell.looks),
  )


def _largest_weight(path: Path) -> float | None:
  found = np.load(path, allow_pickle=False)
  largest = np.concatenate(
    [
      weights[: np.count_nonzero(target)].max(-1)
      for weights, target in zip(found["weights"], found["target"])
    ]
  )
  return float(largest.mean()) if largest.any() else None


def _clock(lines: Sequence[dict[str, float]]) -> dict[int, float]:
  """Seconds of training by step; every start began anew at 0."""
  clock, before, last = {}, 0.0, 0.0
  for line in lines:
    if "first_step_seconds" in line:
      before, last = before + last, 0.0
    if "seconds" in line:
      last = line["seconds"]
      clock[int(line["step"])] = before + last
  return clock


def _lines(path: Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text().splitlines()]


def by_group(results: Iterable[Result]) -> dict[str, list[Result]]:
  """Puts the seeds of the same values together.

  Args:
    results: of complete cells.

  Returns:
    Results by group, in order.

  Example:
    >>> by_group([])
    {}
  """
  groups: dict[str, list[Result]] = {}
  for result in results:
    groups.setdefault(result.cell.group, []).append(result)
  return groups


def scores_of(results: Sequence[Result]) -> list[str]:
  """Returns the metrics that results have.

  Args:
    results: of complete cells.

  Returns:
    Names, of `SCORES`.

  Example:
    >>> scores_of([])
    []
  """
  found = {
    name
    for result in results
    for split in result.splits.values()
    for name in split["metrics"]
  }
  return [name for name in SCORES if name in found]


def write_tables(results: Sequence[Result], folder: Path) -> None:
  """Writes results.csv, curves.csv and by_length.csv.

  They have a line for every cell and evaluation set, look at the validation
  set, and range of lengths of an evaluation set.

  Args:
    results: of complete cells.
    folder: where to.

  Example:
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   write_tables([], Path(folder))
    ...   sorted(path.name for path in Path(folder).iterdir())
    ['by_length.csv', 'curves.csv', 'results.csv']
  """
  scores = scores_of(results)

  def scored(found: Mapping[str, Any]) -> list:
    return [found.get(name, "") for name in scores]

  def by_set(result: Result) -> Iterator[list]:
    for split, found in result.splits.items():
      yield [
        split,
        *scored(found["metrics"]),
        result.largest_weight,
        result.num_parameters,
        result.step_milliseconds,
        result.seconds,
        result.peak_memory,
      ]

  def by_look(result: Result) -> Iterator[list]:
    for point in result.curve:
      yield [int(point["step"]), *scored(point)]

  def by_length(result: Result) -> Iterator[list]:
    for split, found in result.splits.items():
      for row in found["by_length"]:
        ranges = (row["length"], row["to_length"], row.get("count", ""))
        yield [split, *ranges, *scored(row)]

  costs = ["largest_weight", "parameters", "step_milliseconds", "seconds"]
  head = ["split", *scores, *costs, "peak_memory"]
  _write(folder / "results.csv", results, head, by_set)
  _write(folder / "curves.csv", results, ["step", *scores], by_look)
  head = ["split", "length", "to_length", "count", *scores]
  _write(folder / "by_length.csv", results, head, by_length)


def _write(
  path: Path,
  results: Sequence[Result],
  head: Sequence[str],
  rows: Callable[[Result], Iterable[list]],
) -> None:
  """Writes a table, each row after its cell's values and seed."""
  swept = list(results[0].cell.values) if results else []
  with path.open("w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*swept, "seed", *head])
    for result in results:
      values = map(text_of, result.cell.values.values())
      which = [*values, result.cell.seed]
      writer.writerows([*which, *row] for row in rows(result))
