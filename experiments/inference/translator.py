"""Translates lines of text with a restored run."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.checkpoints.restore_run import Restored
from experiments.data.batch import PAD, UNK
from experiments.data.dataset import Dataset
from experiments.data.text.corpus import padded
from experiments.data.text.dataset import TranslationDataset
from experiments.data.text.tokenizer import normalized
from experiments.decoding.batching import Search, make_predictor
from experiments.errors import UserError


class Line(NamedTuple):
  """The translations of one line, and messages about it."""

  texts: list[str]  # best first; "" for a blank line
  scores: list[float]  # zeros without beam search
  cut: str  # a message if the line was truncated, else ""
  unknown: str  # a message if the tokenizer lacks characters, else ""
  source: np.ndarray  # [S] token ids with EOS; empty for a blank line
  tokens: np.ndarray  # [T] token ids of the best translation


def make_translator(
  restored: Restored,
  search: Search,
  *,
  refuse_long: bool = False,
  source: str = "",
) -> Callable[..., list[Line]]:
  """Makes a function that translates blocks of lines.

  Args:
    restored: a run; a line of a synthetic task is "3 1 4", its symbols.
    search: the decoding settings, from `evaluation.search.configured_search`.
    refuse_long: whether a line longer than the model reads is an error; it is
      truncated otherwise.
    source: the name of the file of the lines in messages; "" for none.

  Returns:
    (lines, first=1, progress=None) -> a `Line` for each line. `first` is the
    number of the first line, which messages contain and sampling depends on;
    `progress` is called with the number of lines done since its last call.

  Raises:
    UserError: when called, if a line of a synthetic task is not a sequence of
      its symbols, or a line is too long and `refuse_long` is set.
  """
  experiment, params, _ = restored
  data = experiment.data
  predict = make_predictor(
    experiment.model, experiment.mesh, search, data.max_prediction_length
  )

  def translate(
    lines: Sequence[str],
    *,
    first: int = 1,
    progress: Callable[[int], Any] = lambda count: None,
  ) -> list[Line]:
    lines = [normalized(line) for line in lines]
    indices = [i for i, line in enumerate(lines) if line]
    progress(len(lines) - len(indices))
    results = [_blank(search.n_best)] * len(lines)
    place = f"{source}, line" if source else "line"
    names = [f"{place} {first + i}" for i in indices]
    tokens = encoded(data.source_tokens, [lines[i] for i in indices], names)
    limit = data.max_length - 1
    cuts = cut_messages(tokens, names, limit, refuse=refuse_long)
    sources = padded([row[:limit] for row in tokens], data.max_length)
    predictions = predict(params, sources, progress, first=first - 1)
    for row, index in enumerate(indices):
      best = predictions.tokens[row]
      results[index] = Line(
        data.target_text(best),
        predictions.scores[row].tolist(),
        cuts[row],
        _unknown(data, lines[index], tokens[row], names[row]),
        sources[row][sources[row] != PAD],
        best[0][best[0] != PAD],
      )
    return results

  return translate


def encoded(
  encode: Callable[[Sequence[str]], list[np.ndarray]],
  lines: Sequence[str],
  names: Sequence[str],
) -> list[np.ndarray]:
  """Returns the token ids of lines; an error names the line."""
  try:
    return encode(lines)
  except UserError:
    for name, line in zip(names, lines):
      try:
        encode([line])
      except UserError as error:
        raise UserError(f"{name}: {error}") from error
    raise


def _blank(n_best: int) -> Line:
  none = np.array([], np.int32)
  return Line([""] * n_best, [0.0] * n_best, "", "", none, none)


def cut_messages(
  tokens: list[np.ndarray], names: list[str], limit: int, *, refuse: bool
) -> list[str]:
  """Returns a message for each line that is too long, "" for others."""
  messages = []
  for row, name in zip(tokens, names):
    message = f"{name}: {len(row)} tokens, the model reads {limit}"
    if len(row) > limit and refuse:
      raise UserError(f"{message}; split it")
    cut = f"{message}: the rest is not translated"
    messages.append(cut if len(row) > limit else "")
  return messages


def _unknown(data: Dataset, line: str, tokens: np.ndarray, name: str) -> str:
  if not isinstance(data, TranslationDataset) or UNK not in tokens:
    return ""
  return f"{name}: not in the training text: {data.source.unknown(line)}"
