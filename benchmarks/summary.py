"""Draws docs/results/performance.png from the first table of a document.

    python -m benchmarks.summary

The first column names a quantity, and the columns "ratio" and "limit" say how
many times as fast this project is as the peer, and could be at the most on the
same machine. A cell without a number is left out.
"""

import json
import pathlib
import re
from typing import NamedTuple

from PIL import Image

from experiments import cli
from experiments.visualization import plots

DOCUMENT = pathlib.Path("docs/performance.md")
FIGURE = pathlib.Path("docs/results/performance.png")
_TICKS = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Quantity(NamedTuple):
  """A row of the table."""

  name: str
  ratio: float
  limit: float | None


def quantities(document: str) -> list[Quantity]:
  """Reads the rows of the first table that have a ratio."""
  lines = iter(document.splitlines())
  header = next(filter(_is_row, lines), "")
  columns = _cells(header)
  next(lines, "")  # the rule under the header
  found = []
  for line in lines:
    if not _is_row(line):
      break
    row = dict(zip(columns, _cells(line)))
    ratio = _number(row["ratio"])
    if ratio is not None:
      found.append(Quantity(row[columns[0]], ratio, _number(row["limit"])))
  return found


def draw(rows: list[Quantity], path: pathlib.Path) -> None:
  """Draws a bar for each ratio, and a mark for its limit."""
  height = 0.8 + 0.36 * len(rows)
  figure, (axis,) = plots.make_axes(1, 1, width=9, height=height)
  places = range(len(rows))
  ratios = [row.ratio for row in rows]
  widths = [ratio - 1 for ratio in ratios]
  axis.barh(places, widths, left=1, color=plots.COLORS[0], height=0.6)
  for place, ratio in zip(places, ratios):
    right = axis.get_yaxis_transform()
    axis.text(1.01, place, f"{ratio:g}", va="center", transform=right)
  limits = [(row.limit, place) for place, row in enumerate(rows) if row.limit]
  if limits:
    axis.scatter(
      *zip(*limits),
      marker="|",
      s=200,
      linewidths=2,
      color=plots.COLORS[1],
      label="limit of the machine",
    )
    figure.legend(loc="outside lower right", fontsize=8)
  axis.axvline(1, color="gray", linewidth=1)
  axis.set_yticks(places, [row.name for row in rows])
  axis.invert_yaxis()
  axis.set_xscale("log")
  axis.minorticks_off()
  axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
  largest = max([1, *ratios, *(limit for limit, _ in limits)])
  axis.set_xlim(min([1, *ratios]) / 1.3, largest * 1.3)
  axis.set_xlabel("times as fast as the peer")
  plots.save_figure(figure, path, Description=json.dumps(rows))


def numbers(path: pathlib.Path) -> list[list]:
  """Reads the rows that a figure was drawn from."""
  with Image.open(path) as image:
    return json.loads(image.info["Description"])


def _is_row(line: str) -> bool:
  return line.startswith("|")


def _cells(line: str) -> list[str]:
  return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _number(cell: str) -> float | None:
  found = re.match(r"\d+(\.\d+)?", cell)
  return float(found.group()) if found else None


def main() -> None:
  """Draws the figure."""
  draw(quantities(DOCUMENT.read_text()), FIGURE)


if __name__ == "__main__":
  cli.run(main)
