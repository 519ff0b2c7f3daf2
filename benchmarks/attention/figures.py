"""The figures: time and memory against T, both axes logarithmic."""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.attention.cases import Grid
from benchmarks.attention.measure import Row
from experiments.visualization import plots


class Curve(NamedTuple):
  """The points of a curve."""

  lengths: list[int]
  values: list[float]


def save(
  rows: dict[str, Sequence[Row]], folder: pathlib.Path, grid: Grid
) -> list[pathlib.Path]:
  """Draws the figures of sections that have some; returns their paths."""
  written = []
  if "curves" in rows:
    written += _save_curves(
      rows["curves"], folder, "attention", "one head of size 64"
    )
  if "heads" in rows:
    written += _save_curves(
      rows["heads"], folder, "heads", f"one layer, {max(grid.heads):,} tokens"
    )
  if "window" in rows:
    written += _save_window(rows["window"], folder, grid.window_size)
  return written


def _save_curves(
  rows: Sequence[Row], folder: pathlib.Path, name: str, what: str
) -> list[pathlib.Path]:
  """Draws NAME_time.png and NAME_memory.png; returns their paths."""
  task = f"{rows[0].direction}, {what}, float32"
  paths = [folder / f"{name}_{axis}.png" for axis in ("time", "memory")]
  _save(_times(rows), paths[0], "milliseconds", task)
  _save(_memory(rows), paths[1], "MiB of temporaries", task)
  return paths


def _save_window(
  rows: Sequence[Row], folder: pathlib.Path, size: int
) -> list[pathlib.Path]:
  """Draws sliding_window.png from a row for each length and direction."""
  curves = {}
  for direction in dict.fromkeys(row.direction for row in rows):
    those = [row for row in rows if row.direction == direction]
    for name, curve in _times(those).items():
      curves[f"{name}, {direction}"] = curve
  path = folder / "sliding_window.png"
  title = f"sliding window of {size}, one head of size 64, float32"
  _save(curves, path, "milliseconds", title)
  return [path]


def _times(rows: Sequence[Row]) -> dict[str, Curve]:
  return _curves(rows, lambda entry: entry.seconds, 1e3)


def _memory(rows: Sequence[Row]) -> dict[str, Curve]:
  return _curves(rows, lambda entry: entry.temporary_bytes, 2**-20)


def _curves(rows, value_of, unit) -> dict[str, Curve]:
  """Curves by contender, in the order of the first row."""
  curves: dict[str, Curve] = {}
  for row in rows:
    for entry in row.entries:
      value = value_of(entry)
      if value:  # a logarithmic axis cannot show 0
        curve = curves.setdefault(entry.name, Curve([], []))
        curve.lengths.append(row.length)
        curve.values.append(value * unit)
  return curves


def _save(
  curves: dict[str, Curve], path: pathlib.Path, label: str, title: str
) -> None:
  figure, (axis,) = plots.make_axes(1, 1, width=9, height=5.5)
  for number, (name, curve) in enumerate(curves.items()):
    axis.plot(*curve, label=name, **_style(name, number))
  axis.set_xscale("log", base=2)
  axis.set_yscale("log")
  lengths = sorted({n for curve in curves.values() for n in curve.lengths})
  axis.set_xticks(lengths, list(map(str, lengths)))
  axis.minorticks_off()
  axis.set_xlabel("T = S, tokens")
  axis.set_ylabel(label)
  axis.set_title(title, fontsize=10)
  axis.grid(alpha=0.3)
  plots.add_legend(figure, axis)
  plots.save_figure(figure, path)


def _style(name: str, number: int) -> dict[str, Any]:
  """Solid for `attend`, dashed for the dense reference, dotted for peers."""
  color = plots.COLORS[number % len(plots.COLORS)]
  marks: dict[str, Any] = {"color": color, "marker": "o", "ms": 4, "lw": 1.5}
  peers = {"jax.nn": "black", "torch": "dimgray", "attnax": "darkgray"}
  label, _, direction = name.partition(", ")
  if label in peers:
    color = marks["color"] if direction else peers[label]
    return marks | {"ls": ":", "marker": "^", "lw": 2, "color": color}
  if "reference" in name:
    return marks | {"ls": "--", "marker": "s"}
  return marks
