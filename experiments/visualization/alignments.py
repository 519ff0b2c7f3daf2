"""Figures of the attention weights of an experiment."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import decoding
from experiments.data.batch import PAD, strip
from experiments.data.dataset import Dataset, EvaluationSet
from experiments.errors import UserError
from experiments.evaluation.alignment_error import (
  named_heads,
  pair_weights,
  unpadded_weights,
)
from experiments.experiment import Experiment
from experiments.models.attention_weights import CROSS
from experiments.visualization import plots
from experiments.visualization.attention_view import PairWeights

_NUM_EXAMPLES = 4
# A figure of longer sequences is illegible.
_MAX_TOKENS = 16


def draw_alignments(
  workdir: Path,
  split: str,
  experiment: Experiment,
  params: Any,
  examples: EvaluationSet,
) -> Path:
  """Writes figures/alignments_SPLIT.png and .npz; returns the figure's path."""
  source = _legible(np.asarray(examples.batch.source))
  length = experiment.data.max_prediction_length(source.shape[1])
  predict = functools.partial(
    decoding.greedy, experiment.model, max_length=length
  )
  predicted = np.asarray(jax.jit(predict)(params, source))
  weights = unpadded_weights(experiment.model, params, source, predicted)
  shown = list(zip(source, predicted, weights))
  if len(named_heads(weights[0])) > 1:  # of one example, not of several
    shown = shown[:1]
  panels = [
    panel
    for *tokens, heads in shown
    for panel in make_panels(*_words(experiment.data, *tokens), heads)
  ]
  path = workdir / "figures" / f"alignments_{split}.png"
  if jax.process_index() == 0:
    title = f"{experiment.config.title}, {split}"
    plots.save_attention_figure(panels, path, title)
    plots.save_attention_weights(panels, path.with_suffix(".npz"))
  return path


def make_panels(
  source: Sequence[str], target: Sequence[str], weights: np.ndarray
) -> list[plots.AttentionPanel]:
  """One panel per head for the weights [L, H, T, S] of an example."""
  return [
    plots.AttentionPanel(head, source, target, name)
    for name, head in named_heads(weights).items()
  ]


def make_pair_weights(
  experiment: Experiment,
  params: Any,
  source: np.ndarray,  # [S] token ids with EOS
  target: np.ndarray,  # [T] token ids with EOS
  **texts: str,  # run, text and translation of the result
) -> PairWeights:
  """Returns all attention weights of one pair of source and target."""
  gold = experiment.data.gold_alignments(source, target)
  return PairWeights(
    *_words(experiment.data, source, target),
    pair_weights(experiment.model, params, source, target),
    gold=None if gold is None else gold.sure + gold.possible.astype(np.uint8),
    **texts,
  )


def save_pair(pair: PairWeights, path: Path) -> None:
  """Writes the cross-attention of a pair as PATH.png and PATH.npz."""
  shape = (1, 1, len(pair.target), len(pair.source))
  weights = pair.weights.get(CROSS, np.zeros(shape, np.float32))
  panels = make_panels(pair.source, pair.target, weights)
  plots.save_attention_figure(panels, path.with_suffix(".png"), pair.run)
  plots.save_attention_weights(panels, path.with_suffix(".npz"))


def example_lines(data: Dataset, split: str, count: int) -> list[str]:
  """Returns lines of a set of different lengths, short enough for a figure."""
  examples = data.evaluation_set(split)
  source = np.asarray(examples.batch.source)
  rows = np.flatnonzero((source != PAD).sum(-1) > 1)  # others have EOS alone
  if not len(rows):
    raise UserError(
      f"all sources of the set {split!r} are blank; give lines of your own"
    )
  chosen = rows[_legible_rows(source[rows], count)]
  if examples.text:
    return [examples.text.source[row] for row in chosen]
  return [" ".join(data.source_words(strip(source[row]))) for row in chosen]


def _words(data: Dataset, source, target) -> tuple[list[str], list[str]]:
  """Returns the labels of the tokens of source and target, without PAD."""
  return (
    data.source_words(source[source != PAD]),
    data.target_words(target[target != PAD]),
  )


def _legible(source: np.ndarray) -> np.ndarray:
  """Selects sources of different lengths, the longest legible one first."""
  chosen = _legible_rows(source, _NUM_EXAMPLES)
  return source[chosen, : (source[chosen] != PAD).sum(-1).max()]


def _legible_rows(source: np.ndarray, count: int) -> np.ndarray:
  lengths = (source != PAD).sum(-1)
  order = np.argsort(-lengths, kind="stable")
  legible = order[lengths[order] <= _MAX_TOKENS]
  if not len(legible):
    legible = order[::-1]
  longer_half = legible[: max(len(legible) // 2, count)]
  spread = np.arange(count) * len(longer_half) // count
  return longer_half[np.unique(spread)]
