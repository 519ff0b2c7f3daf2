"""Prunes the heads of a Transformer one at a time, and evaluates the rest."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.config import TransformerConfig
from experiments.data.dataset import EvaluationSet
from experiments.errors import UserError
from experiments.evaluation import make_evaluator
from experiments.evaluation.search import configured_search
from experiments.experiment import Experiment
from experiments.models.attention_weights import CROSS, DECODER, ENCODER
from experiments.visualization import plots

_MODULES = {
  ENCODER: ("encoder", "self_attention"),
  DECODER: ("decoder", "self_attention"),
  CROSS: ("decoder", "cross_attention"),
}


class Pruning(NamedTuple):
  """A metric of the whole model, and of the model without each head."""

  whole: float
  without: dict[str, np.ndarray]  # by kind of attention: [layers, H]


def prune_heads(
  experiment: Experiment,
  params: Any,
  examples: EvaluationSet,
  progress: Callable[[int], Any] = lambda count: None,
) -> dict[str, Pruning]:
  """Returns loss and `config.train.best_metric` without each head, by name.

  Decodes greedily, without further training. See "Are Sixteen Heads Really
  Better than One?", Michel et al., 2019 (https://arxiv.org/abs/1905.10650).
  """
  model = experiment.config.model
  if not isinstance(model, TransformerConfig):
    raise UserError(
      f"--workdir: its model is {model.name!r}; only a Transformer has heads to"
      " prune"
    )
  evaluate = make_evaluator(
    experiment, configured_search(experiment, beam_size=1)
  )
  whole = evaluate(params, examples).metrics
  layers = {"encoder": model.encoder_layers, "decoder": model.decoder_layers}
  results: dict[str, Pruning] = {
    metric: Pruning(
      whole[metric],
      {
        kind: np.zeros((layers[side], model.num_heads))
        for kind, (side, _) in _MODULES.items()
      },
    )
    for metric in dict.fromkeys(("loss", experiment.config.train.best_metric))
  }
  for kind, (side, module) in _MODULES.items():
    for layer, head in np.ndindex(layers[side], model.num_heads):
      less = pruned(params, (f"{side}_{layer}", module), head)
      metrics = evaluate(less, examples).metrics
      for metric, result in results.items():
        result.without[kind][layer, head] = metrics[metric]
      progress(1)
  return results


def pruned(params: Any, module: tuple[str, str], head: int) -> Any:
  """Returns parameters with which a head adds nothing to a layer's output."""
  wanted = (*module, "output_projection", "kernel")

  def changed(path, leaf):
    names = tuple(getattr(key, "key", None) for key in path)
    return leaf.at[head].set(0) if names == wanted else leaf

  return jax.tree_util.tree_map_with_path(changed, params)


def save_figure(results: Mapping[str, Pruning], path: Path, title: str) -> None:
  """Draws the changes: a row for each metric, a column a kind of attention."""
  kinds = list(next(iter(results.values())).without)
  count = len(results) * len(kinds)
  figure, flat = plots.make_axes(
    count, len(kinds), width=4, height=3.2, title=title
  )
  rows = np.reshape(flat, (-1, len(kinds)))
  for axes, (metric, result) in zip(rows, results.items()):
    changes = {kind: abs(result.without[kind] - result.whole) for kind in kinds}
    # Without any change, an empty range would have arbitrary colours.
    most = max(float(change.max()) for change in changes.values()) or 1.0
    for axis, (kind, change) in zip(axes, changes.items()):
      image = axis.imshow(change, vmin=0, vmax=most)
      axis.set_title(kind, fontsize=9)
      axis.set_xlabel("head")
      axis.set_ylabel("layer")
      axis.set_xticks(range(change.shape[1]), range(1, change.shape[1] + 1))
      axis.set_yticks(range(change.shape[0]), range(1, change.shape[0] + 1))
    name = metric.replace("_", " ")
    figure.colorbar(image, ax=axes, label=f"absolute change of {name}")
  plots.save_figure(figure, path)
