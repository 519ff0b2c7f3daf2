"""A trained run as a Python object."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.checkpoints.restore_run import Restored
from experiments.config import Config
from experiments.data.batch import PAD
from experiments.data.text.corpus import padded
from experiments.data.text.tokenizer import normalized
from experiments.decoding.batching import Search
from experiments.errors import UserError, counted, naming_arguments
from experiments.evaluation.evaluator import make_reference_losses
from experiments.evaluation.search import configured_search
from experiments.inference.restored import check_split
from experiments.inference.translator import (
  Line,
  cut_messages,
  encoded,
  make_translator,
)
from experiments.visualization.alignments import (
  example_lines,
  make_pair_weights,
)
from experiments.visualization.attention_view import PairWeights


class Run:
  """A trained run, from `experiments.load`.

  Sources and targets are lines of text; in a synthetic task, symbols separated
  by spaces. The first call for each length compiles a program.

  Attributes:
    config: the run's typed config.
    params: the parameters of the model, as nested dictionaries of arrays.
    checkpoint: a description of the checkpoints that the parameters are from.
    name: the run directory.

  Example:
    >>> import experiments
    >>> run = experiments.load("releases/numbers")
    >>> run
    Run('releases/numbers', numbers: seq2seq (additive), step 1500)
    >>> run.translate(["twelve thousand and one", "nine"])
    ['만 이천일', '구']
  """

  def __init__(self, restored: Restored, name: str):
    self._restored, self.name = restored, name
    self.config: Config = restored.experiment.config
    self.params: Any = restored.params
    self.checkpoint: str = restored.checkpoint
    self._translators: dict[Search, Callable[..., list[Line]]] = {}
    self._losses: Callable[..., Any] | None = None

  def __repr__(self) -> str:
    return f"Run({self.name!r}, {self.config.title}, {self.checkpoint})"

  def translate(
    self,
    lines: Sequence[str],
    *,
    beam_size: int | None = None,
    length_penalty: float | None = None,
    max_length: int | None = None,
  ) -> list[str]:
    """Translates lines.

    Args:
      lines: N source lines.
      beam_size: hypotheses of beam search, 1 for greedy decoding; None for the
        config's `evaluation.beam_size`.
      length_penalty: exponent of GNMT's length normalisation; None for the
        config's.
      max_length: maximum number of tokens of a translation, end of sentence
        included; None for a limit that depends on the source.

    Returns:
      N translations, "" for a blank line.

    Raises:
      UserError: if a line is longer than the model reads, or a line of a
        synthetic task has another symbol; the message names it. Also if
        `lines` is not a list of strings.
    """
    lines = _listed(lines, "lines")
    found = self._translated(
      lines,
      beam_size=beam_size,
      length_penalty=length_penalty,
      max_length=max_length,
    )
    return [line.texts[0] for line in found]

  def score(self, sources: Sequence[str], targets: Sequence[str]) -> np.ndarray:
    """Returns log-probabilities of targets, given their sources.

    Args:
      sources: N source lines.
      targets: N target lines.

    Returns:
      [N] float32 natural logarithms, summed over the tokens of a target, end of
      sentence included.

    Raises:
      UserError: if there are more sources than targets or fewer, a line is
        longer than the model reads, or an argument is not a
        list of strings.
    """
    sources = _listed(sources, "sources")
    targets = _listed(targets, "targets")
    if len(sources) != len(targets):
      both = counted(len(sources), "source"), counted(len(targets), "target")
      raise UserError(f"{both[0]}, but {both[1]}")
    if self._losses is None:
      self._losses = make_reference_losses(self._restored.experiment)
    losses, _ = self._losses(self.params, *self._encoded(sources, targets))
    return -losses

  def attention(self, source: str, target: str | None = None) -> PairWeights:
    """Returns the attention weights of all layers and heads on one pair.

    Args:
      source: a source line.
      target: a target line, whose tokens the decoder reads; None for the greedy
        translation.

    Returns:
      The tokens and the weights; a notebook shows them as an interactive view.

    Raises:
      UserError: if a line is blank or longer than the model reads, or an
        argument is no string.
    """
    for name, text in (("source", source), ("target", target or "")):
      if not isinstance(text, str):
        raise UserError(
          f"{name} must be a string, got a {type(text).__name__}; call"
          " attention for each line"
        )
    if not source.strip():
      raise UserError("attention needs a source that is not blank")
    if target is None:
      (line,) = self._translated([source], beam_size=1)
      tokens, translation = (line.source, line.tokens), line.texts[0]
    else:
      rows = (side[0] for side in self._encoded([source], [target]))
      tokens = tuple(row[row != PAD] for row in rows)
      translation = normalized(target)
    return make_pair_weights(
      self._restored.experiment,
      self.params,
      *tokens,
      run=self.name,
      text=normalized(source),
      translation=translation,
    )

  def example_lines(self, count: int, split: str = "validation") -> list[str]:
    """Returns sources of different lengths that are short enough to show.

    Args:
      count: the largest number of lines.
      split: one of `config.data.splits`.

    Returns:
      At most `count` source lines of an evaluation set.

    Raises:
      UserError: if there is no such set, or its sources are blank.
    """
    with naming_arguments():
      check_split(self._restored.experiment, split)
    return example_lines(self._restored.experiment.data, split, count)

  def _translated(self, lines: Sequence[str], **changes) -> list[Line]:
    with naming_arguments():
      search = configured_search(self._restored.experiment, **changes)
    if search not in self._translators:
      self._translators[search] = make_translator(
        self._restored, search, refuse_long=True
      )
    return self._translators[search](lines)

  def _encoded(self, sources, targets) -> list[np.ndarray]:
    """Returns token ids [N, S] and [N, T], padded and ended by EOS."""
    data = self._restored.experiment.data
    sides = []
    for side, encode, lines in (
      ("source", data.source_tokens, sources),
      ("target", data.target_tokens, targets),
    ):
      names = [f"{side} line {n}" for n in range(1, len(lines) + 1)]
      rows = encoded(encode, [normalized(line) for line in lines], names)
      cut_messages(rows, names, data.max_length - 1, refuse=True)
      sides.append(padded(rows, data.max_length))
    return sides


def _listed(lines: Sequence[str], name: str) -> list[str]:
  """Returns a list; refuses a string, whose characters would be the lines."""
  expected = f"{name} must be a list of strings"
  if isinstance(lines, str):
    raise UserError(f"{expected}, got a string; write [line]")
  listed = list(lines)
  for line in listed:
    if not isinstance(line, str):
      raise UserError(f"{expected}, got a value of type {type(line).__name__}")
  return listed
