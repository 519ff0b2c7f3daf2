"""Translates lines of text with a restored run."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.data.batch import UNK
from experiments.data.text import dataset
from experiments.data.text.corpus import padded
from experiments.data.text.tokenizer import normalized
from experiments.decoding.batching import Search, make_predictor
from experiments.errors import UserError
from experiments.evaluation.alignment_error import make_weights
from experiments.inference.restored import Restored
from experiments.visualization import plots
from experiments.visualization.alignments import make_panels


class Line(NamedTuple):
  """The translations of one line, and messages about it."""

  texts: list[str]  # best first; "" for a blank line
  scores: list[float]  # zeros without beam search
  cut: str  # a message if the line was truncated, else ""
  unknown: str  # a message if the tokenizer lacks characters, else ""
  # Attention weights of the best translation, by head, if they were requested.
  alignments: list[plots.AttentionPanel]


@dataclasses.dataclass(frozen=True)
class Translator:
  """Translates blocks of lines; made by `make_translator`."""

  restored: Restored
  data: dataset.TranslationDataset
  search: Search
  predict: Callable[..., Any]
  weights: Callable[..., Any] | None
  refuse_long: bool

  def __call__(
    self,
    lines: Sequence[str],
    *,
    first: int = 1,
    progress: Callable[[int], Any] | None = None,
  ) -> list[Line]:
    """Translates lines, the first of which has the number `first`.

    Calls `progress` with the number of lines that were translated since its
    last call.
    """
    lines = [normalized(line) for line in lines]
    indices = [i for i, line in enumerate(lines) if line]
    count = self.search.n_best
    blank = Line([""] * count, [0.0] * count, "", "", [])
    results = [blank] * len(lines)
    if progress:
      progress(len(lines) - len(indices))
    if not indices:
      return results
    tokens = self.data.source.encode([lines[i] for i in indices])
    cuts = [self._cut(row, first + i) for i, row in zip(indices, tokens)]
    width = self.data.max_length
    sources = padded([row[: width - 1] for row in tokens], width)
    predictions = self.predict(
      self.restored.params, sources, progress, first=first - 1
    )
    for row, index in enumerate(indices):
      results[index] = Line(
        self.data.target_text(predictions.tokens[row]),
        predictions.scores[row].tolist(),
        cuts[row],
        self._unknown(lines[index], tokens[row], first + index),
        self._alignments(sources[row], predictions.tokens[row, 0]),
      )
    return results

  def _cut(self, tokens: np.ndarray, number: int) -> str:
    limit = self.data.max_length - 1
    if len(tokens) <= limit:
      return ""
    message = f"line {number}: {len(tokens)} tokens, the model reads {limit}"
    if self.refuse_long:
      raise UserError(f"{message}; split it, or use --long_lines=cut")
    return f"{message}: the rest is not translated"

  def _unknown(self, line: str, tokens: np.ndarray, number: int) -> str:
    if UNK not in tokens:
      return ""
    unknown = self.data.source.unknown(line)
    return f"line {number}: not in the training text: {unknown}"

  def _alignments(self, source, prediction) -> list[plots.AttentionPanel]:
    if self.weights is None:
      return []
    experiment, params, _ = self.restored
    (heads,) = self.weights(params, source[None], prediction[None])
    return make_panels(experiment, source, prediction, heads)


def make_translator(
  restored: Restored,
  search: Search,
  *,
  refuse_long: bool = False,
  alignments: bool = False,
) -> Translator:
  """Makes a function that translates blocks of lines.

  Args:
    restored: a run on text.
    search: the decoding settings, from `evaluation.search.configured_search`.
    refuse_long: whether a line longer than the model reads is an error; it is
      truncated otherwise.
    alignments: whether to return attention weights.

  Returns:
    (lines, first=1, progress=None) -> a `Line` for each line. `first` is the
    number of the first line, which messages contain and sampling depends on;
    `progress` is called with the number of lines done since its last call.

  Raises:
    UserError: if the run was not trained on text; when called, if a line is too
      long and `refuse_long` is set.
  """
  experiment = restored.experiment
  if not isinstance(experiment.data, dataset.TranslationDataset):
    raise UserError(
      f"--workdir: its task is {experiment.config.data.name!r}, which has no"
      " text to translate; use experiments.evaluate"
    )
  predict = make_predictor(
    experiment.model,
    experiment.mesh,
    search,
    experiment.data.max_prediction_length,
  )
  weights = make_weights(experiment) if alignments else None
  return Translator(
    restored, experiment.data, search, predict, weights, refuse_long
  )


def save_alignments(line: Line, number: int, folder: Path) -> None:
  """Writes NUMBER.png and NUMBER.npz of a line that is not blank."""
  if line.alignments:
    path = folder / f"{number:06d}.png"
    plots.save_attention_figure(line.alignments, path)
    plots.save_attention_weights(line.alignments, path.with_suffix(".npz"))
