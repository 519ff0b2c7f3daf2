"""Translating lines of text with a finished run."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.data.batch import UNK
from experiments.data.text.corpus import padded
from experiments.data.text.dataset import TranslationDataset
from experiments.data.text.tokenizer import normalized
from experiments.decoding.batching import Search, make_answerer
from experiments.errors import UserError
from experiments.evaluation import alignment_error
from experiments.inference.restored import Finished
from experiments.visualization import plots


class Line(NamedTuple):
  """What came of a line.

  Attributes:
    texts: its translations, best first; of a blank line, as many blanks.
    scores: theirs.
    cut: that the line was too long, and how; or "".
    unknown: which of its characters were never seen; or "".
    looks: where the best translation looked, one panel a head; empty unless
      asked for.
  """

  texts: list[str]
  scores: list[float]
  cut: str
  unknown: str
  looks: list[plots.AttentionPanel]


@dataclasses.dataclass(frozen=True)
class Translator:
  """Translates blocks of lines; made by `make_translator`.

  Attributes:
    finished: the run.
    data: its tokenisers.
    search: how to choose a translation.
    answer: decodes token ids.
    refuse_long: whether a line longer than the model reads is an error.
    look: tells where translations look, or None.

  Example:
    >>> translate = make_translator(restore(workdir), Search())
    ... # doctest: +SKIP
    >>> translate(["Two dogs run."])[0].texts  # doctest: +SKIP
    ['Zwei Hunde rennen.']
  """

  finished: Finished
  data: TranslationDataset
  search: Search
  answer: Callable[..., Any]
  refuse_long: bool
  look: Callable[..., Any] | None

  def __call__(
    self,
    lines: Sequence[str],
    *,
    first: int = 1,
    progress: Callable[[int], Any] | None = None,
  ) -> list[Line]:
    """Translates lines; line i of the result belongs to line i.

    Args:
      lines: text.
      first: the number of the first line, for messages.
      progress: called with the number of lines done since the last call.

    Returns:
      What came of each line.

    Raises:
      UserError: naming a line that is too long, if such are refused.
    """
    lines = [normalized(line) for line in lines]
    places = [i for i, line in enumerate(lines) if line]
    count = self.search.n_best
    blank = Line([""] * count, [0.0] * count, "", "", [])
    results = [blank] * len(lines)
    if progress:
      progress(len(lines) - len(places))
    if not places:
      return results
    tokens = self.data.source.encode([lines[i] for i in places])
    cuts = [self._cut(row, first + i) for i, row in zip(places, tokens)]
    # As wide as any: `answer` narrows to one of few widths.
    width = self.data.max_length
    sources = padded([row[: width - 1] for row in tokens], width)
    found = self.answer(
      self.finished.params, sources, progress, first=first - 1
    )
    for row, place in enumerate(places):
      results[place] = Line(
        self.data.target_text(found.tokens[row]),
        found.scores[row].tolist(),
        cuts[row],
        self._unknown(lines[place], tokens[row], first + place),
        self._looks(sources[row], found.tokens[row, 0]),
      )
    return results

  def _cut(self, tokens: np.ndarray, number: int) -> str:
    limit = self.data.max_length - 1
    if len(tokens) <= limit:
      return ""
    long = f"line {number}: {len(tokens)} tokens, the model reads {limit}"
    if self.refuse_long:
      raise UserError(f"{long}; split it, or use --long_lines=cut")
    return f"{long}: what comes after is not translated"

  def _unknown(self, line: str, tokens: np.ndarray, number: int) -> str:
    if UNK not in tokens:
      return ""
    unknown = self.data.source.unknown(line)
    return f"line {number}: never seen in training: {unknown}"

  def _looks(self, source, answer) -> list[plots.AttentionPanel]:
    if self.look is None:
      return []
    return self.look(self.finished.params, source[None], answer[None])[0]


def make_translator(
  finished: Finished,
  search: Search,
  *,
  refuse_long: bool = False,
  alignments: bool = False,
) -> Translator:
  """Makes a function that translates blocks of lines.

  Args:
    finished: the run.
    search: how to choose a translation.
    refuse_long: whether a line longer than the model reads is an error, rather
      than translated in part.
    alignments: whether to tell where translations look.

  Returns:
    (lines, first=1, progress=None) -> what came of each line.

  Raises:
    UserError: if the run is not one of text.

  Example:
    >>> finished = restore(Path("runs/multi30k"))  # doctest: +SKIP
    >>> translate = make_translator(finished, Search())  # doctest: +SKIP
  """
  run = finished.run
  if not isinstance(run.data, TranslationDataset):
    raise UserError(
      f"--workdir: its task is {run.config.data.name!r}, which has no text to"
      " translate; use experiments.evaluate"
    )
  answer = make_answerer(
    run.model, run.mesh, search, run.data.max_prediction_length
  )
  look = alignment_error.make_looker(run) if alignments else None
  return Translator(finished, run.data, search, answer, refuse_long, look)


def save_looks(line: Line, number: int, folder: Path) -> None:
  """Writes where a translation looked: a picture, and the weights.

  Args:
    line: what came of a line, with its looks.
    number: its number, from 1.
    folder: gets NUMBER.png and NUMBER.npz; nothing for a blank line.

  Example:
    >>> save_looks(lines[0], 1, Path("figures"))  # doctest: +SKIP
  """
  if line.looks:
    path = folder / f"{number:06d}.png"
    plots.save_attention_figure(line.looks, path)
    plots.save_attention_weights(line.looks, path.with_suffix(".npz"))
