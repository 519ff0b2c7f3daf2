"""Figures of the attention weights of an experiment."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import decoding
from experiments.data.batch import PAD
from experiments.data.dataset import Dataset, EvaluationSet
from experiments.evaluation.alignment_error import head_name, unpadded_weights
from experiments.experiment import Experiment
from experiments.visualization import plots

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
  panels = [
    panel
    for example in zip(source, predicted, weights)
    for panel in make_panels(experiment, *example)
  ]
  if len(weights[0]) > 1:  # all heads of one example, not several examples
    panels = panels[: len(weights[0])]
  path = workdir / "figures" / f"alignments_{split}.png"
  if jax.process_index() == 0:
    plots.save_attention_figure(panels, path)
    plots.save_attention_weights(panels, path.with_suffix(".npz"))
  return path


def make_panels(
  experiment: Experiment, source, target, heads
) -> list[plots.AttentionPanel]:
  """One panel per head for the weights [H, T, S] of an example."""
  data: Dataset = experiment.data
  words = (
    data.source_words(source[source != PAD]),
    data.target_words(target[target != PAD]),
  )
  return [
    plots.AttentionPanel(
      head, *words, head_name(experiment, index) if len(heads) > 1 else ""
    )
    for index, head in enumerate(heads)
  ]


def _legible(source: np.ndarray) -> np.ndarray:
  """Selects sources of different lengths, the longest legible one first."""
  lengths = (source != PAD).sum(-1)
  order = np.argsort(-lengths, kind="stable")
  legible = order[lengths[order] <= _MAX_TOKENS]
  if not len(legible):
    legible = order[::-1]
  longer_half = legible[: max(len(legible) // 2, _NUM_EXAMPLES)]
  spread = np.arange(_NUM_EXAMPLES) * len(longer_half) // _NUM_EXAMPLES
  chosen = longer_half[np.unique(spread)]
  return source[chosen, : lengths[chosen].max()]
