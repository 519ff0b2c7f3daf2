"""Translating lines of text with a finished run."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import plots, report
from experiments.answering import Search, make_answerer
from experiments.data.corpus import padded
from experiments.data.tokenizer import normalized
from experiments.data.translation import Translation
from experiments.errors import UserError
from experiments.inference import Finished


class Line(NamedTuple):
  """What came of a line.

  Attributes:
    texts: its translations, best first; of a blank line, as many blanks.
    scores: theirs.
    remarks: what a user should know, such as that the line was cut.
    looks: where the best translation looked, one panel a head; empty unless
      asked for.
  """

  texts: list[str]
  scores: list[float]
  remarks: list[str]
  looks: list[plots.Alignment]


@dataclasses.dataclass(frozen=True)
class Translator:
  """Translates blocks of lines; made by `make_translator`.

  Attributes:
    finished: the run.
    data: its tokenisers.
    search: how to choose a translation.
    answer: decodes token ids.
    refuse_long: whether a line longer than the model reads is an error.
    alignments: whether to tell where translations look.

  Example:
    >>> translate = make_translator(restore(workdir), Search())
    ... # doctest: +SKIP
    >>> translate(["Two dogs run."])[0].texts  # doctest: +SKIP
    ['Zwei Hunde rennen.']
  """

  finished: Finished
  data: Translation
  search: Search
  answer: Callable[..., Any]
  refuse_long: bool
  alignments: bool

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
    blank = Line([""] * self.search.n_best, [0.0] * self.search.n_best, [], [])
    results = [blank] * len(lines)
    if progress:
      progress(len(lines) - len(places))
    if not places:
      return results
    tokens = self.data.source.encode([lines[i] for i in places])
    remarks = [
      self._remarks(lines[i], row, first + i) for i, row in zip(places, tokens)
    ]
    limit = self.data.max_length - 1
    tokens = [row[:limit] for row in tokens]
    sources = padded(tokens, 1 + max(map(len, tokens)))
    found = self.answer(self.finished.params, sources, progress)
    for row, place in enumerate(places):
      results[place] = Line(
        self.data.target_text(found.tokens[row]),
        found.scores[row].tolist(),
        remarks[row],
        self._looks(sources[row], found.tokens[row, 0]),
      )
    return results

  def _remarks(self, line: str, tokens: np.ndarray, number: int) -> list[str]:
    remarks = []
    limit = self.data.max_length - 1
    if len(tokens) > limit:
      long = f"line {number}: {len(tokens)} tokens, the model reads {limit}"
      if self.refuse_long:
        raise UserError(f"{long}; split it, or use --long_lines=cut")
      remarks.append(f"{long}: what comes after is not translated")
    unknown = self.data.source.unknown(line)
    if unknown:
      remarks.append(f"line {number}: never seen in training: {unknown}")
    return remarks

  def _looks(self, source, answer) -> list[plots.Alignment]:
    if not self.alignments:
      return []
    run, params = self.finished.run, self.finished.params
    return report.looks(run, params, source[None], answer[None])[0]


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
  if not isinstance(run.data, Translation):
    raise UserError(
      f"--workdir: its task is {run.config.data.name!r}, which has no text to"
      " translate; use experiments.evaluate"
    )
  answer = make_answerer(run.model, run.mesh, search, run.data.answer_length)
  return Translator(finished, run.data, search, answer, refuse_long, alignments)


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
    plots.save_alignments(line.looks, path)
    plots.save_weights(line.looks, path.with_suffix(".npz"))
