"""Figures of a run, and the arrays behind them."""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.visualization import fonts

_DPI = 120
# In inches, for labels of 7 points.
_ENTRY, _LETTER = 0.15, 0.06
_MIN_SIDE, _MAX_SIDE, _MAX_WIDTH = 2.6, 9.0, 22.0
_MAX_PIXELS = 16_000
_MAX_LABELS, _MAX_LETTERS = 60, 30


class AttentionPanel(NamedTuple):
  """A heat map of attention weights.

  Attributes:
    weights: [T, S] from 0 to 1.
    source: S words.
    target: T words, the prediction.
    title: of the panel.
  """

  weights: np.ndarray
  source: Sequence[str]
  target: Sequence[str]
  title: str


def make_figure(
  rows: int, columns: int, *, width: float, height: float
) -> tuple[Any, np.ndarray]:
  """Returns a figure outside pyplot's global state, and its axes."""
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  size = (width * columns, height * rows)
  figure = Figure(figsize=size, layout="constrained")
  FigureCanvasAgg(figure)
  return figure, figure.subplots(rows, columns, squeeze=False)


def save_figure(figure, path: Path) -> None:
  """Writes a figure as PNG, of 16,000 pixels a side at most."""
  path.parent.mkdir(parents=True, exist_ok=True)
  dpi = min(_DPI, _MAX_PIXELS / max(figure.get_size_inches()))
  figure.savefig(path, dpi=dpi)


def save_attention_figure(panels: Sequence[AttentionPanel], path: Path) -> None:
  """Draws attention weights as in Bahdanau et al. (2014, figure 3).

  The figure grows with the number of words until it is 22 inches wide. Up to
  60 words are all written along an axis, every second of more, and so on.

  Args:
    panels: one heat map each: source from left to right, prediction from top to
      bottom, white for weight 1 and black for 0. A character that no installed
      font has is drawn as U+FFFD, and a warning is logged.
    path: a PNG to write; its folder is made.

  Example:
    >>> import tempfile
    >>> panel = AttentionPanel(np.eye(2), ["a", "b"], ["b", "a"], "head 1")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   save_attention_figure([panel], Path(folder) / "attention.png")
  """
  panels, families = _legible(panels)
  width, height = _panel_size(panels)
  columns = min(len(panels), 4, max(int(_MAX_WIDTH / width), 1))
  rows = -(-len(panels) // columns)
  figure, axes = make_figure(rows, columns, width=width, height=height)
  for axis in axes.flat[len(panels) :]:
    axis.set_axis_off()
  for axis, panel in zip(axes.flat, panels):
    image = _draw_panel(axis, panel, families)
  figure.colorbar(image, ax=axes[0], shrink=0.6, label="attention weight")
  save_figure(figure, path)


def _draw_panel(axis, panel: AttentionPanel, families: Sequence[str]):
  image = axis.imshow(panel.weights, cmap="gray", vmin=0, vmax=1, aspect="auto")
  # Without parse_math=False, "$" in a word would start a formula.
  text = {"fontfamily": families, "parse_math": False}
  axis.set_xticks(*_ticks(panel.source), rotation=90, **text)
  axis.set_yticks(*_ticks(panel.target), **text)
  axis.tick_params(labelsize=7, length=2)
  axis.set_title(panel.title, fontsize=9, **text)
  axis.set_xlabel("source", fontsize=8)
  axis.set_ylabel("prediction", fontsize=8)
  return image


def _ticks(words: Sequence[str]) -> tuple[range, list[str]]:
  """The positions of the labels, and the words there."""
  positions = range(0, len(words), max(-(-len(words) // _MAX_LABELS), 1))
  return positions, [words[position] for position in positions]


def _legible(
  panels: Sequence[AttentionPanel],
) -> tuple[list[AttentionPanel], list[str]]:
  """Panels with short words of characters that the returned fonts have."""
  text = "".join(
    "".join([*panel.source, *panel.target, panel.title]) for panel in panels
  )
  families, missing = fonts.families_for(text)
  if missing:
    fonts.warn_once(missing)
  replaced = str.maketrans(dict.fromkeys(missing, fonts.REPLACEMENT))

  def legible(word: str) -> str:
    if len(word) > _MAX_LETTERS:
      word = word[:_MAX_LETTERS] + "\u2026"
    return word.translate(replaced)

  return [
    AttentionPanel(
      panel.weights,
      [legible(word) for word in panel.source],
      [legible(word) for word in panel.target],
      panel.title.translate(replaced),
    )
    for panel in panels
  ], families


def _panel_size(panels: Sequence[AttentionPanel]) -> tuple[float, float]:
  """Width and height in inches that suit every panel."""

  def side(words: Sequence[Sequence[str]], labels: Sequence[Sequence[str]]):
    entries = _ENTRY * max(map(len, words))
    room = _LETTER * max((_width(w) for ws in labels for w in ws), default=0)
    return min(max(entries, _MIN_SIDE), _MAX_SIDE) + room + 0.6

  sources = [panel.source for panel in panels]
  targets = [panel.target for panel in panels]
  return side(sources, targets), side(targets, sources)


def _width(word: str) -> int:
  """The width of a word in letters; Hangul and the like are two wide."""
  return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in word)


def save_attention_weights(
  panels: Sequence[AttentionPanel], path: Path
) -> None:
  """Writes the arrays that `save_attention_figure` draws.

  `numpy.load` reads them: `weights` [P, T, S] float32, and the words `source`
  [P, S], `target` [P, T] and `title` [P]. Panels smaller than the largest are
  padded with zeros, and their words with "".

  Args:
    panels: P of them.
    path: an .npz to write; its folder is made.

  Example:
    >>> import tempfile
    >>> panel = AttentionPanel(np.eye(2), ["a", "b"], ["b", "a"], "head 1")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   save_attention_weights([panel], Path(folder) / "weights.npz")
    ...   np.load(Path(folder) / "weights.npz")["target"].tolist()
    [['b', 'a']]
  """
  targets = max(len(panel.target) for panel in panels)
  sources = max(len(panel.source) for panel in panels)
  weights = np.zeros((len(panels), targets, sources), np.float32)
  for padded, panel in zip(weights, panels):
    padded[: len(panel.target), : len(panel.source)] = panel.weights
  path.parent.mkdir(parents=True, exist_ok=True)
  np.savez_compressed(
    path,
    weights=weights,
    source=_padded([panel.source for panel in panels]),
    target=_padded([panel.target for panel in panels]),
    title=np.array([panel.title for panel in panels]),
  )


def _padded(rows: Sequence[Sequence[str]]) -> np.ndarray:
  """[N, L] words, with "" after the end of shorter rows."""
  longest = max(map(len, rows))
  return np.array([[*row, *[""] * (longest - len(row))] for row in rows])


def save_accuracy_by_length(
  curves: Mapping[str, Sequence[Mapping[str, Any]]],
  path: Path,
  *,
  trained_length: int | None = None,
) -> None:
  """Draws sequence and token accuracy against the source length.

  Args:
    curves: by name, rows of `by_length` in eval/SPLIT.json.
    path: a PNG to write; its folder is made.
    trained_length: the longest length in training, marked by a line.

  Example:
    >>> import tempfile
    >>> rows = [{"length": 3, "sequence_accuracy": 0.5, "token_accuracy": 0.9}]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   save_accuracy_by_length({"test": rows}, Path(folder) / "curves.png")
  """
  figure, axes = make_figure(1, 2, width=5, height=4)
  for axis, field in zip(axes[0], ("sequence_accuracy", "token_accuracy")):
    for name, rows in curves.items():
      lengths = [row["length"] for row in rows]
      axis.plot(lengths, [row[field] for row in rows], ".-", label=name)
    if trained_length is not None:
      axis.axvline(trained_length, color="gray", ls=":", lw=1)
      axis.annotate(
        "longest in training ",
        (trained_length, 0.05),
        ha="right",
        fontsize=7,
        color="gray",
      )
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel("source length")
    axis.set_ylabel(field.replace("_", " "))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
  save_figure(figure, path)
