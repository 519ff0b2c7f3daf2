"""What each head of a Transformer is worth: the loss without it.

Axes: H heads, D model.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.data.dataset import EvaluationSet
from experiments.errors import UserError
from experiments.evaluation import make_reference_losses
from experiments.runs import Run
from experiments.schema import TransformerConfig

_PLACES = {
  "encoder self-attention": ("encoder", "self_attention"),
  "decoder self-attention": ("decoder", "self_attention"),
  "cross-attention": ("decoder", "cross_attention"),
}


class Worth(NamedTuple):
  """The losses of a model, whole and with one head less.

  Attributes:
    whole: the loss a token of the whole model.
    without: by kind of attention, [layers, H] losses.
  """

  whole: float
  without: dict[str, np.ndarray]


def worth_of_heads(
  run: Run,
  params: Any,
  examples: EvaluationSet,
  progress: Callable[[int], Any] = lambda count: None,
) -> Worth:
  """Prunes each head in turn, and takes the loss of the references.

  A pruned head adds nothing to its layer's output; nothing is trained again.
  See "Are Sixteen Heads Really Better than One?", Michel et al., 2019, section
  3.2 (https://arxiv.org/abs/1905.10650).

  Args:
    run: the parts of a run of a Transformer.
    params: its parameters.
    examples: a set.
    progress: called with 1 after every head.

  Returns:
    The losses.

  Raises:
    UserError: if the run is of another model.

  Example:
    >>> worth = worth_of_heads(run, params, examples)  # doctest: +SKIP
    >>> worth.without["cross-attention"] - worth.whole  # doctest: +SKIP
    array([[0.03, 0.  , 1.52, 0.11]])
  """
  model = run.config.model
  if not isinstance(model, TransformerConfig):
    raise UserError(f"{model.name}: only a Transformer has heads to prune")
  reference_losses = make_reference_losses(run)
  source, target = map(np.asarray, examples.batch)

  def loss(params) -> float:
    losses, tokens = reference_losses(params, source, target)
    return float(losses.sum() / tokens.sum())

  layers = {"encoder": model.encoder_layers, "decoder": model.decoder_layers}
  without: dict[str, np.ndarray] = {}
  for name, (side, module) in _PLACES.items():
    without[name] = np.zeros((layers[side], model.num_heads))
    for layer, head in np.ndindex(without[name].shape):
      place = (f"{side}_{layer}", module)
      without[name][layer, head] = loss(pruned(params, place, head))
      progress(1)
  return Worth(loss(params), without)


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


def save_picture(worth: Worth, path: Path) -> None:
  """Draws how much loss each head saves, a panel for each kind of attention.

  Args:
    worth: of a run's heads.
    path: a PNG to write; its folder is made.

  Example:
    >>> import tempfile
    >>> worth = Worth(0.1, {"cross-attention": np.array([[0.1, 0.4]])})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   save_picture(worth, Path(folder) / "heads.png")
  """
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  figure = Figure(figsize=(4 * len(worth.without), 3.2), layout="constrained")
  FigureCanvasAgg(figure)
  most = max(float(losses.max()) for losses in worth.without.values())
  axes = figure.subplots(1, len(worth.without), squeeze=False)[0]
  for axis, (name, losses) in zip(axes, worth.without.items()):
    image = axis.imshow(losses - worth.whole, vmin=0, vmax=most - worth.whole)
    axis.set_title(name, fontsize=9)
    axis.set_xlabel("head")
    axis.set_ylabel("layer")
    axis.set_xticks(range(losses.shape[1]), range(1, losses.shape[1] + 1))
    axis.set_yticks(range(losses.shape[0]), range(1, losses.shape[0] + 1))
  figure.colorbar(image, ax=axes, label="loss that the head saves")
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=120)
