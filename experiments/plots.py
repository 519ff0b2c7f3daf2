"""Pictures of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Alignment(NamedTuple):
  """One panel: where every target token looked.

  Attributes:
    weights: [T, S].
    source: S words.
    target: T words.
    title: of the panel.
  """

  weights: np.ndarray
  source: Sequence[str]
  target: Sequence[str]
  title: str


def save_alignments(panels: Sequence[Alignment], path: Path) -> None:
  """Draws alignments as Bahdanau et al. (2014, figure 3) do.

  Args:
    panels: one heat map each: source from left to right, target from top to
      bottom, white for all the weight and black for none.
    path: a PNG to write; its folder is made.

  Example:
    >>> import tempfile
    >>> panel = Alignment(np.eye(2), ["a", "b"], ["b", "a"], "head 1")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   save_alignments([panel], Path(folder) / "alignments.png")
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  columns = min(len(panels), 4)
  rows = -(-len(panels) // columns)
  figure = Figure(figsize=(4.2 * columns, 4.2 * rows), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots(rows, columns, squeeze=False)
  for axis in axes.flat[len(panels) :]:
    axis.set_axis_off()
  for axis, panel in zip(axes.flat, panels):
    image = axis.imshow(
      panel.weights, cmap="gray", vmin=0, vmax=1, aspect="auto"
    )
    axis.set_xticks(range(len(panel.source)), panel.source, rotation=90)
    axis.set_yticks(range(len(panel.target)), panel.target)
    axis.tick_params(labelsize=7, length=2)
    axis.set_title(panel.title, fontsize=9)
    axis.set_xlabel("source", fontsize=8)
    axis.set_ylabel("target", fontsize=8)
  figure.colorbar(image, ax=axes, shrink=0.6, label="attention weight")
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)


def save_accuracy_by_length(
  curves: Mapping[str, Sequence[Mapping[str, Any]]],
  path: Path,
  *,
  trained_length: int | None = None,
) -> None:
  """Draws whole-sequence and token accuracy against the source's length.

  Args:
    curves: name to `Evaluation.by_length`.
    path: a PNG to write; its folder is made.
    trained_length: the longest length in training, marked by a line.

  Example:
    >>> import tempfile
    >>> rows = [{"length": 3, "sequence_accuracy": 0.5, "token_accuracy": 0.9}]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   save_accuracy_by_length({"test": rows}, Path(folder) / "curves.png")
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(10, 4), layout="constrained")
  FigureCanvasAgg(figure)
  for axis, field in zip(
    figure.subplots(1, 2), ("sequence_accuracy", "token_accuracy")
  ):
    for name, rows in curves.items():
      lengths = [row["length"] for row in rows]
      axis.plot(lengths, [row[field] for row in rows], ".-", label=name)
    if trained_length is not None:
      axis.axvline(trained_length, color="gray", ls=":", lw=1)
      axis.annotate(
        " trained up to here", (trained_length, 0.02), fontsize=7, color="gray"
      )
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel("source length")
    axis.set_ylabel(field.replace("_", " "))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
