"""What each head of a Transformer is worth: how the model does without it.

Axes: H heads, D model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.config import TransformerConfig
from experiments.data.dataset import EvaluationSet
from experiments.errors import UserError
from experiments.evaluation.evaluator import make_evaluator
from experiments.experiment import Run
from experiments.inference.restored import configured_search

_PLACES = {
  "encoder self-attention": ("encoder", "self_attention"),
  "decoder self-attention": ("decoder", "self_attention"),
  "cross-attention": ("decoder", "cross_attention"),
}


class Worth(NamedTuple):
  """A metric of a model, whole and with one head less.

  Attributes:
    whole: of the whole model.
    without: by kind of attention, [layers, H] of the model without that head.
  """

  whole: float
  without: dict[str, np.ndarray]


def worth_of_heads(
  run: Run,
  params: Any,
  examples: EvaluationSet,
  progress: Callable[[int], Any] = lambda count: None,
) -> dict[str, Worth]:
  """Prunes each head in turn, and evaluates what is left.

  A pruned head adds nothing to its layer's output; nothing is trained again.
  See "Are Sixteen Heads Really Better than One?", Michel et al., 2019, section
  3.2 (https://arxiv.org/abs/1905.10650).

  Args:
    run: the parts of a run of a Transformer.
    params: its parameters.
    examples: a set.
    progress: called with 1 after every head.

  Returns:
    What heads are worth in loss, and in the metric by which the run chose its
    best checkpoint, by name; answers are chosen greedily, as then.

  Raises:
    UserError: if the run is of another model.

  Example:
    >>> worth = worth_of_heads(run, params, examples)  # doctest: +SKIP
    >>> worth["loss"].without["cross-attention"]  # doctest: +SKIP
    array([[0.03, 0.01, 1.52, 0.11]])
  """
  model = run.config.model
  if not isinstance(model, TransformerConfig):
    raise UserError(f"{model.name}: only a Transformer has heads to prune")
  evaluate = make_evaluator(run, configured_search(run, beam_size=1))
  whole = evaluate(params, examples).metrics
  layers = {"encoder": model.encoder_layers, "decoder": model.decoder_layers}
  found: dict[str, Worth] = {
    metric: Worth(
      whole[metric],
      {
        kind: np.zeros((layers[side], model.num_heads))
        for kind, (side, _) in _PLACES.items()
      },
    )
    for metric in dict.fromkeys(("loss", run.config.train.best_metric))
  }
  for kind, (side, module) in _PLACES.items():
    for layer, head in np.ndindex(layers[side], model.num_heads):
      less = pruned(params, (f"{side}_{layer}", module), head)
      metrics = evaluate(less, examples).metrics
      for metric, worth in found.items():
        worth.without[kind][layer, head] = metrics[metric]
      progress(1)
  return found


def pruned(params: Any, place: tuple[str, str], head: int) -> Any:
  """Returns parameters with which one head adds nothing.

  Args:
    params: of a Transformer.
    place: names of a layer and of one of its attention modules.
    head: which, from 0.

  Returns:
    The parameters, but for the rows [H, D / H, D] of the head's output.

  Example:
    >>> params = {"encoder_0": {"self_attention": {"output_projection": {
    ...   "kernel": jax.numpy.ones((2, 1, 3))}}}}
    >>> pruned(params, ("encoder_0", "self_attention"), 1)["encoder_0"][
    ...   "self_attention"]["output_projection"]["kernel"].tolist()
    [[[1.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]]]
  """
  wanted = (*place, "output_projection", "kernel")

  def changed(path, leaf):
    here = tuple(getattr(key, "key", None) for key in path)
    return leaf.at[head].set(0) if here == wanted else leaf

  return jax.tree_util.tree_map_with_path(changed, params)


def save_picture(worths: Mapping[str, Worth], path: Path) -> None:
  """Draws what changes without each head, a panel for each kind of attention.

  Args:
    worths: of a run's heads, by metric; each has a row of panels.
    path: a PNG to write; its folder is made.

  Example:
    >>> import tempfile
    >>> worth = Worth(0.1, {"cross-attention": np.array([[0.1, 0.4]])})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   save_picture({"loss": worth}, Path(folder) / "heads.png")
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  kinds = list(next(iter(worths.values())).without)
  size = (4 * len(kinds), 3.2 * len(worths))
  figure = Figure(figsize=size, layout="constrained")
  FigureCanvasAgg(figure)
  rows = figure.subplots(len(worths), len(kinds), squeeze=False)
  for axes, (metric, worth) in zip(rows, worths.items()):
    changes = {kind: abs(worth.without[kind] - worth.whole) for kind in kinds}
    most = max(float(change.max()) for change in changes.values())
    for axis, (kind, change) in zip(axes, changes.items()):
      image = axis.imshow(change, vmin=0, vmax=most)
      axis.set_title(kind, fontsize=9)
      axis.set_xlabel("head")
      axis.set_ylabel("layer")
      axis.set_xticks(range(change.shape[1]), range(1, change.shape[1] + 1))
      axis.set_yticks(range(change.shape[0]), range(1, change.shape[0] + 1))
    named = metric.replace("_", " ")
    figure.colorbar(image, ax=axes, label=f"change of {named} without a head")
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
