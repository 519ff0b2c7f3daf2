"""Evaluating a model on a set: its answers, scored as a whole and by length.

Axes: N examples, B of them at a time, S source, T target.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.data.batch import PAD, Batch
from experiments.data.dataset import EvaluationSet
from experiments.decoding.batching import (
  ROWS,
  Compiled,
  Search,
  by_length,
  make_answerer,
)
from experiments.distributed import mesh as mesh_lib
from experiments.evaluation import metrics
from experiments.evaluation.alignment_error import make_aligner
from experiments.experiment import Run
from experiments.optimization.step import make_loss_step

# Lines of a table by length.
_NUM_BINS = 10
_NAMES = {"bleu": "BLEU", "chrf": "chrF"}


class Evaluation(NamedTuple):
  """What came of an evaluation.

  Attributes:
    metrics: name to value, see `metrics.score`, and sentences_per_second.
    by_length: a dictionary a source length, see `metrics.score_by_length`.
    signatures: how BLEU and chrF were computed, as sacreBLEU says it.
    answers: N answers as a reader knows them.
    search: how they were chosen: beam_size and length_penalty.
    num_truncated: number of examples that are longer than the model reads.
    num_parameters: of the model.
    alignment: the error rate of each panel, see `make_aligner`.
  """

  metrics: dict[str, float]
  by_length: list[dict[str, Any]]
  signatures: dict[str, str]
  answers: list[str]
  search: dict[str, float]
  num_truncated: int
  num_parameters: int
  alignment: dict[str, float]


def make_evaluator(
  run: Run, search: Search = Search(), *, aligned: bool = False
) -> Callable[[Any, EvaluationSet], Evaluation]:
  """Makes a function that evaluates parameters on a set.

  It compiles once for each width of a batch.

  Args:
    run: the parts of a run.
    search: how to choose an answer.
    aligned: whether to tell how often the model looks at a wrong token, where
      that is known; alignment_error_rate is that of the best panel.

  Returns:
    (params, set) -> evaluation.

  Example:
    >>> from pathlib import Path
    >>> from configs import base
    >>> from experiments import experiment
    >>> from experiments.config import parse
    >>> config = base.get_config("none")
    >>> config.data.splits = {"validation": base.split(1, 2, 4)}
    >>> config.data.max_length = 2
    >>> run = experiment.build(
    ...   parse(config.to_dict()), Path("unused")
    ... )
    >>> evaluate = make_evaluator(run)
    >>> examples = run.data.evaluation_set("validation")
    >>> evaluation = evaluate(experiment.start(run).params, examples)
    >>> len(evaluation.answers)
    4
  """
  answer = make_answerer(
    run.model, run.mesh, search, run.data.max_prediction_length
  )
  reference_losses = make_reference_losses(run)
  align = make_aligner(run)
  config = run.config.evaluation
  how = {"beam_size": search.beam_size, "length_penalty": search.length_penalty}

  def evaluate(params: Any, examples: EvaluationSet) -> Evaluation:
    (source, target), text = map(np.asarray, examples.batch), examples.text
    found = answer(params, source)
    predicted = found.tokens[:, 0]
    if text:  # A blank line's translation is one.
      predicted[[not line.strip() for line in text.source]] = PAD
    references = text.target if text else run.data.target_text(target)
    answers = run.data.target_text(predicted)
    scored = metrics.Scored(
      (source != PAD).sum(1) - 1,
      predicted,
      target,
      *reference_losses(params, source, target),
      answers,
      references,
    )
    judge = metrics.Judge(
      config.bleu_tokenizer, lowercase=config.lowercase, text=text is not None
    )
    scores = metrics.score(scored, judge)
    scores["sentences_per_second"] = len(answers) / max(found.seconds, 1e-9)
    rates = align(params, examples) if aligned else {}
    if rates:
      scores["alignment_error_rate"] = min(rates.values())
    rows = (
      metrics.score_by_length(scored, judge, num_bins=_NUM_BINS)
      if text
      else metrics.score_by_length(scored, None)
    )
    return Evaluation(
      scores,
      rows,
      judge.signatures,
      answers,
      how,
      examples.num_truncated,
      sum(leaf.size for leaf in jax.tree.leaves(params)),
      rates,
    )

  return evaluate


def make_reference_losses(
  run: Run,
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
  """Makes a function that tells how likely the references are.

  Args:
    run: the parts of a run.

  Returns:
    (params, source [N, S], target [N, T]) -> losses [N], summed over tokens,
    and numbers of tokens [N].

  Example:
    >>> losses = make_reference_losses(run)  # doctest: +SKIP
    >>> found, tokens = losses(params, source, target)  # doctest: +SKIP
  """
  loss_step = make_loss_step(run.model)
  compiled = Compiled(lambda _, *given: loss_step(*given), run.mesh)
  rows = mesh_lib.rounded_up(ROWS, run.mesh)

  def reference_losses(params: Any, source: np.ndarray, target: np.ndarray):
    losses = np.zeros(len(source), np.float32)
    tokens = np.zeros(len(source), np.int32)
    for members, *part in by_length(rows, source, target):
      found, _ = compiled(None, params, Batch(*part))
      losses[members], tokens[members] = (x[: len(members)] for x in found)
    return losses, tokens

  return reference_losses


def table(rows: list[dict[str, Any]], *, num_bins: int = _NUM_BINS) -> str:
  """Lays metrics by length out as a table of text.

  Args:
    rows: `Evaluation.by_length`.
    num_bins: more lengths than that are pooled.

  Returns:
    A heading and a line a range of lengths.

  Example:
    >>> print(table([{"length": 3, "to_length": 3, "count": 2, "tokens": 8,
    ...               "token_accuracy": 1.0, "sequence_accuracy": 0.5}]))
    length    examples  token accuracy  sequence accuracy
    3                2         100.00%             50.00%
  """
  columns = [name for name in ("bleu", "chrf") if name in rows[0]]
  heading = "length    examples  token accuracy  sequence accuracy"
  lines = [heading + "".join(f"{_NAMES[name]:>8}" for name in columns)]
  for row in rows if columns else pooled(rows, num_bins):
    first, last = row["length"], row["to_length"]
    name = str(first) if first == last else f"{first}-{last}"
    lines.append(
      f"{name:<8}{row['count']:>10}{row['token_accuracy']:>16.2%}"
      f"{row['sequence_accuracy']:>19.2%}"
      + "".join(f"{row[column]:>8.2f}" for column in columns)
    )
  return "\n".join(lines)


def pooled(rows: list[dict[str, Any]], num_bins: int) -> list[dict[str, Any]]:
  """Joins neighbouring lengths, until there are few enough.

  Args:
    rows: `Evaluation.by_length` of a task, a row for each length.
    num_bins: so many at most.

  Returns:
    Rows with both accuracies, and the loss where they have one.

  Example:
    >>> rows = [
    ...   {"length": n, "to_length": n, "count": 1, "tokens": 2,
    ...    "token_accuracy": 1.0, "sequence_accuracy": n - 1} for n in (1, 2)
    ... ]
    >>> float(pooled(rows, 1)[0]["sequence_accuracy"])
    0.5
  """
  low, high = rows[0]["length"], rows[-1]["to_length"]
  width = max(1, -(-(high - low + 1) // num_bins))
  pooled = []
  for first in range(low, high + 1, width):
    chosen = [row for row in rows if first <= row["length"] < first + width]
    if not chosen:
      continue
    weights = {
      "token_accuracy": [row["tokens"] for row in chosen],
      "sequence_accuracy": [row["count"] for row in chosen],
      "loss": [row["tokens"] for row in chosen],
    }
    pooled.append(
      {
        "length": first,
        "to_length": min(first + width - 1, high),
        "count": sum(weights["sequence_accuracy"]),
        **{
          name: np.average([row[name] for row in chosen], weights=each)
          for name, each in weights.items()
          if name in chosen[0]
        },
      }
    )
  return pooled
