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
  """The result of translating one line.

  Attributes:
    texts: translations, best first; empty strings for a blank line.
    scores: of the translations; zeros without a beam search.
    cut: a message if the line was longer than the model reads, else "".
    unknown: a message naming characters that the tokenizer lacks, else "".
    alignments: attention weights of the best translation, one entry a head;
      empty unless requested.
  """

  texts: list[str]
  scores: list[float]
  cut: str
  unknown: str
  alignments: list[plots.AttentionPanel]


@dataclasses.dataclass(frozen=True)
class Translator:
  """Translates blocks of lines; made by `make_translator`."""

  restored: Restored
  data: dataset.TranslationDataset
  search: Search
  predict: Callable[..., Any]
  refuse_long: bool
  weights: Callable[..., Any] | None

  def __call__(
    self,
    lines: Sequence[str],
    *,
    first: int = 1,
    progress: Callable[[int], Any] | None = None,
  ) -> list[Line]:
    """Translates lines, in order.

    Args:
      lines: text.
      first: the number of the first line, for messages and sampling.
      progress: called with the number of lines done since the last call.

    Returns:
      A result for each line.

    Raises:
      UserError: naming a line that is too long, if these are refused.
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
    # Full width: `predict` narrows it to one of few widths.
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
    (heads,) = self.weights(
      self.restored.params, source[None], prediction[None]
    )
    return make_panels(self.restored.experiment, source, prediction, heads)


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
    search: the decoding settings, from `evaluation.configured_search`.
    refuse_long: whether a line longer than the model reads is an error; it is
      truncated otherwise.
    alignments: whether to return attention weights.

  Returns:
    (lines, first=1, progress=None) -> a `Line` for each line.

  Raises:
    UserError: if the run was not trained on text.

  Example:
    >>> from configs import base
    >>> from experiments.config import parse
    >>> from experiments.experiment import make_experiment
    >>> config = parse(base.get_config().to_dict())
    >>> experiment = make_experiment(config, Path("unused"))
    >>> make_translator(Restored(experiment, None, "step 0"), Search())
    Traceback (most recent call last):
    experiments.errors.UserError: --workdir: its task is 'reverse', which has...
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
    restored, experiment.data, search, predict, refuse_long, weights
  )


def save_alignments(line: Line, number: int, folder: Path) -> None:
  """Writes NUMBER.png and NUMBER.npz of a line that is not blank."""
  if line.alignments:
    path = folder / f"{number:06d}.png"
    plots.save_attention_figure(line.alignments, path)
    plots.save_attention_weights(line.alignments, path.with_suffix(".npz"))
