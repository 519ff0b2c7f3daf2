"""The figures of a comparison."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.comparison.results import Results, groups
from experiments.comparison.statistics import interval
from experiments.evaluation.metrics import CORPUS_NAMES
from experiments.visualization import plots


def draw_all(
  results: Results, metric: str, folder: Path
) -> list[tuple[str, str]]:
  """Draws all figures as PNG; returns their file names and captions."""
  name = label(metric)
  captions = {
    "by_length.png": f"{name} by source length",
    "curves.png": f"{name} on validation by training step",
    "curves_by_time.png": f"{name} on validation by training time",
    "costs.png": "time per step, and peak memory",
    "attention_weights.png": (
      "attention weights of the first seed of each group"
    ),
  }
  data = results.trials[0].raw["data"]["name"]
  titles = {file: f"{data}: {caption}" for file, caption in captions.items()}
  curves = results.curves.assign(minutes=results.curves["seconds"] / 60)
  for file, draw in (
    ("by_length.png", partial(_draw_lengths, results.lengths, metric)),
    ("curves.png", partial(_draw_curves, curves, metric, "step")),
    ("curves_by_time.png", partial(_draw_curves, curves, metric, "minutes")),
    ("costs.png", partial(_draw_costs, results.splits)),
    ("attention_weights.png", partial(_draw_attention_weights, results)),
  ):
    draw(folder / file, titles[file])
  return list(captions.items())


def label(metric: str) -> str:
  """The name of a metric as text."""
  return CORPUS_NAMES.get(metric, metric.replace("_", " "))


def _draw_lengths(
  table: pd.DataFrame, metric: str, path: Path, title: str
) -> None:
  """Means over seeds with their intervals, in a panel for each set."""
  by_split = _without_repetition(groups(table, "split"))
  figure, axes = _panels(len(by_split), 5, title)
  for axis, split in zip(axes, by_split):
    for number, (group, rows) in enumerate(groups(by_split[split]).items()):
      by_length = rows.dropna(subset=metric).groupby("length")[metric]
      lengths = list(by_length.groups)
      intervals = [interval(list(values)) for _, values in by_length]
      means, widths = np.reshape(intervals, (-1, 2)).T
      widths = np.nan_to_num(widths)
      style = plots.style(number)
      axis.plot(lengths, means, label=group, **style)
      # An interval of Student's t may exceed the range of an accuracy.
      most = 1 if metric.endswith("accuracy") else np.inf
      low, high = np.clip([means - widths, means + widths], 0, most)
      axis.fill_between(lengths, low, high, color=style["color"], alpha=0.15)
    axis.xaxis.get_major_locator().set_params(integer=True)
    _annotate(axis, split, "source length", metric)
  _save(figure, path)


def _without_repetition(
  by_split: dict[str, pd.DataFrame],
) -> dict[str, pd.DataFrame]:
  """Leaves out validation, and sets that others cover in parts."""
  if len(by_split) > 1:
    by_split = {k: v for k, v in by_split.items() if k != "validation"}
  lengths = {split: set(rows["length"]) for split, rows in by_split.items()}

  def parts(split: str) -> set[int]:
    smaller = (each for each in lengths.values() if each < lengths[split])
    return set().union(*smaller)

  return {k: v for k, v in by_split.items() if parts(k) != lengths[k]}


def _draw_curves(
  curves: pd.DataFrame, metric: str, time: str, path: Path, title: str
) -> None:
  """Learning curves of every seed on the validation set."""
  figure, (axis,) = _panels(1, 7, title)
  for number, (group, rows) in enumerate(groups(curves).items()):
    for index, points in enumerate(groups(rows, "seed").values()):
      axis.plot(
        points[time],
        points[metric],
        label=None if index else group,
        alpha=0.7,
        **plots.style(number),
      )
  axis_label = "minutes of training" if time == "minutes" else time
  _annotate(axis, "", axis_label, metric)
  _save(figure, path)


def _draw_costs(splits: pd.DataFrame, path: Path, title: str) -> None:
  """Bars: the median over seeds of each group."""
  figure, axes = _panels(2, 5, title)
  by_group = groups(splits)
  names = list(by_group)
  for axis, field, unit, axis_label in (
    (axes[0], "step_milliseconds", 1, "milliseconds per step"),
    (axes[1], "peak_memory", 2**20, "peak memory, MiB"),
  ):
    sizes = [rows[field].median() / unit for rows in by_group.values()]
    colors = [plots.style(number)["color"] for number in range(len(names))]
    axis.barh(names, sizes, color=colors)
    axis.invert_yaxis()
    axis.set_xlabel(axis_label)
  plots.save_figure(figure, path)


def _draw_attention_weights(results: Results, path: Path, title: str) -> None:
  """Draws each group's weights of one sentence: first seed, mean over heads."""
  # Groups without attention have no panel, unless no group has attention.
  weighted = set(results.splits.dropna(subset="largest_weight")["group"])
  loaded: dict[str, Any] = {}
  for trial in results.trials:
    if trial.group not in loaded and (trial.group in weighted or not weighted):
      weights = np.load(trial.attention_weights, allow_pickle=False)
      loaded[trial.group] = weights
  index = _most_agreed([arrays["target"] for arrays in loaded.values()])
  panels = []
  for group, arrays in loaded.items():
    source, target = (
      [word for word in arrays[side][index] if word]
      for side in ("source", "target")
    )
    # A Transformer's panels have titles, and are the heads of one sentence.
    heads = arrays["weights"]
    if not arrays["title"][0]:
      heads = heads[index : index + 1]
    weights = heads.mean(0)[: len(target), : len(source)]
    panels.append(plots.AttentionPanel(weights, source, target, group))
  plots.save_attention_figure(panels, path, title)


def _most_agreed(predictions: Sequence[np.ndarray]) -> int:
  """The index of the sentence with the most equal predictions."""

  def agreeing(index: int) -> int:
    texts = [tuple(filter(None, each[index].tolist())) for each in predictions]
    return max(map(texts.count, texts))

  return max(range(min(map(len, predictions))), key=agreeing)


def _panels(count: int, width: float, title: str):
  """A figure and `count` axes, in rows of at most three."""
  return plots.make_axes(
    count, min(count, 3), width=width, height=4, title=title
  )


def _annotate(axis, title: str, axis_label: str, metric: str) -> None:
  axis.set_title(title, fontsize=10)
  axis.set_xlabel(axis_label)
  axis.set_ylabel(label(metric))
  if axis.dataLim.ymax <= 0:  # All values are 0: negative ones would be shown.
    axis.set_ylim(-0.03, 1.03)
  axis.grid(alpha=0.3)


def _save(figure, path: Path) -> None:
  """Adds one legend beside the panels and writes the figure."""
  plots.add_legend(figure, figure.axes[0])
  plots.save_figure(figure, path)
