"""Figures of a run, and the arrays behind them."""

import io
import textwrap
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.run_directory import make_folder, write_bytes
from experiments.visualization import fonts

_DPI = 120
# In inches, for labels of 7 points.
_ENTRY, _LETTER = 0.15, 0.06
_TITLE_LETTER = 0.09  # in a title of 10 points
_MIN_SIDE, _MAX_SIDE, _MAX_WIDTH = 2.6, 9.0, 22.0
_MAX_PIXELS = 16_000
_MAX_LABELS, _MAX_LETTERS = 60, 30
# Colours that people with any colour vision tell apart: Okabe and Ito, 2008
# (https://jfly.uni-koeln.de/color), without yellow, which is faint on white.
COLORS = (
  "#0072B2",
  "#D55E00",
  "#009E73",
  "#CC79A7",
  "#56B4E9",
  "#E69F00",
  "#000000",
)
_LINES, _MARKERS = ("-", "--", ":"), "os^Dv"


class AttentionPanel(NamedTuple):
  """A heat map of attention weights."""

  weights: np.ndarray  # [T, S], from -1 to 1
  source: Sequence[str]  # S words
  target: Sequence[str]  # T words, the prediction
  title: str


def make_axes(
  count: int, columns: int, *, width: float, height: float, title: str = ""
) -> tuple[Any, list[Any]]:
  """Returns a figure, and `count` axes in rows of `columns`, without pyplot."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  rows = -(-count // columns)
  size = (width * columns, height * rows)
  figure = Figure(figsize=size, layout="constrained")
  FigureCanvasAgg(figure)
  if title:
    letters = max(int(size[0] / _TITLE_LETTER), _MAX_LETTERS)
    text = textwrap.fill(fonts.drawable(title), letters)
    figure.suptitle(text, fontsize=10, parse_math=False)
  axes = figure.subplots(rows, columns, squeeze=False)
  for axis in axes.flat[count:]:
    axis.set_axis_off()
  return figure, list(axes.flat[:count])


def style(number: int) -> dict[str, Any]:
  """The colour, line and marker of the curve of a number; 105 are different."""
  return {
    "color": COLORS[number % len(COLORS)],
    "linestyle": _LINES[number // len(COLORS) % len(_LINES)],
    "marker": _MARKERS[number % len(_MARKERS)],
    "markersize": 3.5,
    "linewidth": 1.5,
  }


def add_legend(figure, axis) -> None:
  """Adds one legend for all panels, with the names in `axis`, beside them."""
  handles, names = axis.get_legend_handles_labels()
  figure.legend(handles, names, loc="outside right upper", fontsize=8)


def save_figure(figure, path: Path, **metadata: str) -> None:
  """Writes a figure as PNG of at most 16,000 pixels per side."""
  make_folder(path.parent)
  dpi = min(_DPI, _MAX_PIXELS / max(figure.get_size_inches()))
  image = io.BytesIO()
  options = {"format": path.suffix[1:], "dpi": dpi}
  figure.savefig(image, metadata=metadata or None, **options)
  write_bytes(path, image.getvalue())


def save_attention_figure(
  panels: Sequence[AttentionPanel], path: Path, title: str = ""
) -> None:
  """Draws attention weights as in Bahdanau et al. (2014, figure 3)."""
  panels = [
    panel._replace(
      source=list(map(_label, panel.source)),
      target=list(map(_label, panel.target)),
      title=fonts.drawable(panel.title),
    )
    for panel in panels
  ]
  width, height = _panel_size(panels)
  columns = min(len(panels), 4, max(int(_MAX_WIDTH / width), 1))
  figure, axes = make_axes(
    len(panels), columns, width=width, height=height, title=title
  )
  is_signed = any((panel.weights < 0).any() for panel in panels)
  # White is 1 and black 0. If a weight is negative, blue is 1 and red -1.
  colors: dict[str, Any] = {"cmap": "gray", "vmin": 0, "vmax": 1}
  if is_signed:
    colors = {"cmap": "RdBu", "vmin": -1, "vmax": 1}
  for axis, panel in zip(axes, panels):
    image = _draw_panel(axis, panel, colors)
  first_row = axes[:columns]
  figure.colorbar(image, ax=first_row, shrink=0.6, label="attention weight")
  save_figure(figure, path)


def _draw_panel(axis, panel: AttentionPanel, colors: Mapping[str, Any]):
  image = axis.imshow(panel.weights, **colors, aspect="auto")
  # Without parse_math=False, "$" in a word would start a formula.
  text = {"fontfamily": fonts.families(), "parse_math": False}
  axis.set_xticks(*_ticks(panel.source), rotation=90, **text)
  axis.set_yticks(*_ticks(panel.target), **text)
  axis.tick_params(labelsize=7, length=2)
  axis.set_title(panel.title, fontsize=9, **text)
  axis.set_xlabel("source", fontsize=8)
  axis.set_ylabel("prediction", fontsize=8)
  return image


def _ticks(words: Sequence[str]) -> tuple[range, list[str]]:
  """The positions of the labels, and their words."""
  positions = range(0, len(words), max(-(-len(words) // _MAX_LABELS), 1))
  return positions, [words[position] for position in positions]


def _label(word: str) -> str:
  """Shortens a word, and replaces characters without a glyph."""
  short = word[:_MAX_LETTERS] + "\u2026"
  return fonts.drawable(word if len(word) <= _MAX_LETTERS else short)


def _panel_size(panels: Sequence[AttentionPanel]) -> tuple[float, float]:
  """The width and height in inches that are enough for every panel."""

  def side(words: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]):
    entries = _ENTRY * max(map(len, words))
    room = _LETTER * max((_width(w) for ws in labels for w in ws), default=0)
    return min(max(entries, _MIN_SIDE), _MAX_SIDE) + room + 0.6

  sources = [panel.source for panel in panels]
  targets = [panel.target for panel in panels]
  return side(sources, targets), side(targets, sources)


def _width(word: str) -> int:
  """The width of a word in Latin letters; East Asian characters count two."""
  return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in word)


def save_attention_weights(
  panels: Sequence[AttentionPanel], path: Path
) -> None:
  """Writes the arrays of a figure as .npz, padded with zeros and ""."""
  targets = max(len(panel.target) for panel in panels)
  sources = max(len(panel.source) for panel in panels)
  weights = np.zeros((len(panels), targets, sources), np.float32)
  for padded, panel in zip(weights, panels):
    padded[: len(panel.target), : len(panel.source)] = panel.weights
  make_folder(path.parent)
  arrays = io.BytesIO()
  np.savez_compressed(
    arrays,
    weights=weights,  # [P, T, S]
    source=_padded([panel.source for panel in panels]),  # [P, S]
    target=_padded([panel.target for panel in panels]),  # [P, T]
    title=np.array([panel.title for panel in panels]),  # [P]
  )
  write_bytes(path, arrays.getvalue())


def _padded(rows: Sequence[Sequence[str]]) -> np.ndarray:
  """The words as [N, L], with "" as padding."""
  longest = max(map(len, rows))
  return np.array([[*row, *[""] * (longest - len(row))] for row in rows])


def save_accuracy_by_length(
  curves: Mapping[str, Sequence[Mapping[str, Any]]],
  path: Path,
  *,
  trained_length: int | None = None,  # the longest source in training
  title: str = "",
) -> None:
  """Draws the `by_length` of several eval/SPLIT.json, by name of the curve."""
  figure, axes = make_axes(2, 2, width=5, height=4, title=title)
  for axis, field in zip(axes, ("sequence_accuracy", "token_accuracy")):
    for number, (name, rows) in enumerate(curves.items()):
      lengths = [row["length"] for row in rows]
      accuracies = [row[field] for row in rows]
      axis.plot(lengths, accuracies, label=name, **style(number))
    if trained_length is not None:
      axis.axvline(trained_length, color="gray", ls=":", lw=1)
      axis.annotate(
        "longest in training",
        (trained_length, 1.01),
        xycoords=("data", "axes fraction"),
        ha="center",
        fontsize=7,
        color="gray",
      )
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel("source length")
    axis.set_ylabel(field.replace("_", " "))
    axis.grid(alpha=0.3)
  add_legend(figure, axes[0])
  save_figure(figure, path)
