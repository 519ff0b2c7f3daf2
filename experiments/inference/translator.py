"""Translates lines of text with a restored run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.data.batch import UNK
from experiments.data.text.corpus import padded
from experiments.data.text.dataset import TranslationDataset
from experiments.data.text.tokenizer import normalized
from experiments.decoding.batching import Search, make_predictor
from experiments.errors import UserError
from experiments.evaluation.alignment_error import unpadded_weights
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


def make_translator(
  restored: Restored,
  search: Search,
  *,
  refuse_long: bool = False,
  alignments: bool = False,
) -> Callable[..., list[Line]]:
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
  experiment, params, _ = restored
  data = experiment.data
  if not isinstance(data, TranslationDataset):
    raise UserError(
      f"--workdir: its task is {experiment.config.data.name!r}, which has no"
      " text to translate; use experiments.evaluate"
    )
  predict = make_predictor(
    experiment.model, experiment.mesh, search, data.max_prediction_length
  )

  def panels(source, prediction) -> list[plots.AttentionPanel]:
    (heads,) = unpadded_weights(
      experiment.model, params, source[None], prediction[None]
    )
    return make_panels(experiment, source, prediction, heads)

  def translate(
    lines: Sequence[str],
    *,
    first: int = 1,
    progress: Callable[[int], Any] = lambda count: None,
  ) -> list[Line]:
    lines = [normalized(line) for line in lines]
    indices = [i for i, line in enumerate(lines) if line]
    progress(len(lines) - len(indices))
    blank = Line([""] * search.n_best, [0.0] * search.n_best, "", "", [])
    results = [blank] * len(lines)
    if not indices:
      return results
    tokens = data.source.encode([lines[i] for i in indices])
    limit = data.max_length - 1
    cuts = [_cut(len(row), limit, first + i) for i, row in zip(indices, tokens)]
    if refuse_long and any(cuts):
      message = next(filter(None, cuts))
      raise UserError(f"{message}; split it, or use --long_lines=cut")
    sources = padded([row[:limit] for row in tokens], data.max_length)
    predictions = predict(params, sources, progress, first=first - 1)
    for row, index in enumerate(indices):
      best = predictions.tokens[row]
      results[index] = Line(
        data.target_text(best),
        predictions.scores[row].tolist(),
        f"{cuts[row]}: the rest is not translated" if cuts[row] else "",
        _unknown(data, lines[index], tokens[row], first + index),
        panels(sources[row], best[0]) if alignments else [],
      )
    return results

  return translate


def _cut(length: int, limit: int, number: int) -> str:
  if length <= limit:
    return ""
  return f"line {number}: {length} tokens, the model reads {limit}"


def _unknown(
  data: TranslationDataset, line: str, tokens: np.ndarray, number: int
) -> str:
  if UNK not in tokens:
    return ""
  return f"line {number}: not in the training text: {data.source.unknown(line)}"


def save_alignments(line: Line, number: int, folder: Path) -> None:
  """Writes NUMBER.png and NUMBER.npz of a line that is not blank."""
  if line.alignments:
    path = folder / f"{number:06d}.png"
    plots.save_attention_figure(line.alignments, path)
    plots.save_attention_weights(line.alignments, path.with_suffix(".npz"))
