"""Pictures of a comparison."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.comparison.results import Result
from experiments.comparison.statistics import interval
from experiments.visualization import plots

_DPI = 120
Groups = Mapping[str, Sequence[Result]]


def draw_all(
  groups: Groups, metric: str, folder: Path
) -> list[tuple[str, str]]:
  """Draws every picture.

  Args:
    groups: complete cells by group.
    metric: what the curves show.
    folder: gets PNG files.

  Returns:
    The files' names and what they show.

  Example:
    >>> draw_all(groups, "bleu", Path("figures"))  # doctest: +SKIP
    [('by_length.png', 'bleu by the length of the source'), ...]
  """
  folder.mkdir(parents=True, exist_ok=True)
  named = metric.replace("_", " ")
  drawn = [
    ("by_length.png", f"{named} by the length of the source", _draw_lengths),
    ("curves.png", f"{named} while training, by steps", _draw_steps),
    ("clock.png", f"{named} while training, by the clock", _draw_clock),
    ("costs.png", "a step's time, and memory", _draw_costs),
    ("alignments.png", "where the first seed of each looks", _draw_alignments),
  ]
  for name, _, draw in drawn:
    draw(groups, metric, folder / name)
  return [(name, caption) for name, caption, _ in drawn]


def _draw_lengths(groups: Groups, metric: str, path: Path) -> None:
  """A panel for each set: means over seeds, and their intervals."""
  splits = list(next(iter(groups.values()))[0].splits)
  figure, axes = _figure(len(splits), width=5)
  for axis, split in zip(axes, splits):
    for name, results in groups.items():
      by_length: dict[int, list[float]] = {}
      for result in results:
        for row in result.splits[split]["by_length"]:
          if metric in row:
            by_length.setdefault(row["length"], []).append(row[metric])
      bins = sorted(by_length)
      found = [interval(by_length[length]) for length in bins]
      means = np.array([each.mean for each in found])
      widths = np.nan_to_num([each.half_width for each in found])
      (line,) = axis.plot(bins, means, ".-", label=name)
      # An interval of Student's t may leave what a share can be.
      most = 1 if metric.endswith("accuracy") else np.inf
      low, high = np.clip([means - widths, means + widths], 0, most)
      axis.fill_between(bins, low, high, color=line.get_color(), alpha=0.15)
    axis.xaxis.get_major_locator().set_params(integer=True)
    _finish(axis, split, "source length", metric)
  _save(figure, path)


def _draw_steps(groups: Groups, metric: str, path: Path) -> None:
  _draw_curves(groups, metric, path, lambda point: point["step"], "step")


def _draw_clock(groups: Groups, metric: str, path: Path) -> None:
  label = "minutes of training"
  _draw_curves(groups, metric, path, lambda point: point["seconds"] / 60, label)


def _draw_curves(
  groups: Groups,
  metric: str,
  path: Path,
  time_of: Callable[[Mapping[str, float]], float],
  label: str,
) -> None:
  """The validation set's, of every seed."""
  figure, (axis,) = _figure(1, width=7)
  for number, (name, results) in enumerate(groups.items()):
    for seed, result in enumerate(results):
      axis.plot(
        [time_of(point) for point in result.curve],
        [point[metric] for point in result.curve],
        color=f"C{number % 10}",
        alpha=0.7,
        label=name if not seed else None,
      )
  _finish(axis, "validation", label, metric)
  _save(figure, path)


def _draw_costs(groups: Groups, metric: str, path: Path) -> None:
  """Bars, as long as the median seed's."""
  del metric
  figure, axes = _figure(2, width=5)
  names = list(groups)
  for axis, field, scale, label in (
    (axes[0], "step_milliseconds", 1, "milliseconds a step"),
    (axes[1], "peak_memory", 2**20, "peak memory, MiB"),
  ):
    sizes = [
      statistics.median(getattr(result, field) for result in results) / scale
      for results in groups.values()
    ]
    axis.barh(names, sizes, color=[f"C{i % 10}" for i in range(len(names))])
    axis.invert_yaxis()
    axis.set_xlabel(label)
  figure.savefig(path, dpi=_DPI)


def _draw_alignments(groups: Groups, metric: str, path: Path) -> None:
  """The same sentence through each group's first seed, heads averaged.

  A group that looks nowhere, without attention, has no panel.
  """
  del metric
  first = {name: results[0] for name, results in groups.items()}
  looking = {n: each for n, each in first.items() if each.largest_weight}
  loaded = {
    name: np.load(each.cell.looks, allow_pickle=False)
    for name, each in (looking or first).items()
  }
  place = _most_agreed([found["target"] for found in loaded.values()])
  panels = []
  for name, found in loaded.items():
    source, target = (
      [word for word in found[side][place] if word]
      for side in ("source", "target")
    )
    # A Transformer's panels are heads over one sentence.
    one = slice(place, place + 1)
    heads = found["weights"] if found["title"][0] else found["weights"][one]
    weights = heads.mean(0)[: len(target), : len(source)]
    panels.append(plots.AttentionPanel(weights, source, target, name))
  plots.save_attention_figure(panels, path)


def _most_agreed(answers: Sequence[np.ndarray]) -> int:
  """The sentence that most groups answer alike, so that looks compare."""

  def agreeing(place: int) -> int:
    found = [tuple(filter(None, each[place].tolist())) for each in answers]
    return max(map(found.count, found))

  return max(range(min(map(len, answers))), key=agreeing)


def _figure(columns: int, width: float):
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  per_row = min(columns, 3)
  rows = math.ceil(columns / per_row)
  figure = Figure(figsize=(width * per_row, 4 * rows), layout="constrained")
  FigureCanvasAgg(figure)
  axes = figure.subplots(rows, per_row, squeeze=False).flat
  for axis in axes[columns:]:
    axis.set_axis_off()
  return figure, axes[:columns]


def _finish(axis, title: str, label: str, metric: str) -> None:
  axis.set_title(title, fontsize=10)
  axis.set_xlabel(label)
  axis.set_ylabel(metric.replace("_", " "))
  axis.grid(alpha=0.3)


def _save(figure, path: Path) -> None:
  """With one legend, beside the panels, where it hides nothing."""
  names = figure.axes[0].get_legend_handles_labels()
  figure.legend(*names, loc="outside right upper", fontsize=8)
  figure.savefig(path, dpi=_DPI)
