"""Evaluates parameters on a set: decodes it, and scores the predictions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.data.batch import PAD, Batch
from experiments.data.dataset import Dataset, EvaluationSet
from experiments.decoding.batch_function import BatchFunction, Call
from experiments.decoding.batching import (
  Search,
  by_length,
  make_predictor,
  num_rows,
)
from experiments.evaluation import metrics
from experiments.evaluation.alignment_error import alignment_error_rates
from experiments.experiment import Experiment
from experiments.optimization.step import make_loss_step

NUM_BINS = 10  # rows of a table by length


class Evaluation(NamedTuple):
  """The result of an evaluation.

  Attributes:
    metrics: by name, see `metrics.score`, and sentences_per_second.
    by_length: one dictionary a source length, see `metrics.score_by_length`.
    signatures: sacreBLEU's description of BLEU and chrF.
    predictions: N decoded texts.
    search: beam_size and length_penalty.
    num_truncated: number of examples that were truncated.
    num_parameters: of the model.
    alignment_error_rates: by head, see `alignment_error.alignment_error_rates`.
  """

  metrics: dict[str, float]
  by_length: list[dict[str, Any]]
  signatures: dict[str, str]
  predictions: list[str]
  search: dict[str, float]
  num_truncated: int
  num_parameters: int
  alignment_error_rates: dict[str, float]


def make_evaluator(
  experiment: Experiment, search: Search = Search()
) -> Callable[[Any, EvaluationSet], Evaluation]:
  """Makes a function that evaluates; it compiles once for each batch width.

  Args:
    experiment: provides model, mesh, data and config.
    search: the decoding settings; greedy by default.

  Returns:
    (params, set) -> evaluation, without alignment error rates.

  Example:
    >>> from pathlib import Path
    >>> from configs import base
    >>> from experiments.config import parse
    >>> from experiments.experiment import make_experiment
    >>> config = base.get_config("none")
    >>> config.data.splits = {"validation": base.split(1, 2, 4)}
    >>> config.data.max_length = 2
    >>> config.mesh.data = 1  # one device
    >>> experiment = make_experiment(parse(config.to_dict()), Path("unused"))
    >>> evaluate = make_evaluator(experiment)
    >>> examples = experiment.data.evaluation_set("validation")
    >>> evaluation = evaluate(experiment.initial_state().params, examples)
    >>> len(evaluation.predictions)
    4
  """
  data, config = experiment.data, experiment.config.evaluation
  predict = make_predictor(
    experiment.model, experiment.mesh, search, data.max_prediction_length
  )
  reference_losses = make_reference_losses(experiment)

  def evaluate(params: Any, examples: EvaluationSet) -> Evaluation:
    source, target = map(np.asarray, examples.batch)
    decoded = predict(params, source)
    losses = reference_losses(params, source, target)
    scored = _scored_set(data, examples, decoded.tokens[:, 0], *losses)
    text = examples.text
    corpus = metrics.CorpusMetrics(config, text=text is not None)
    scores = metrics.score(scored, corpus)
    seconds = max(decoded.seconds, 1e-9)
    scores["sentences_per_second"] = len(scored.predictions) / seconds
    return Evaluation(
      metrics=scores,
      by_length=metrics.score_by_length(
        scored,
        corpus if text else None,
        num_bins=NUM_BINS if text else None,
      ),
      signatures=corpus.signatures,
      predictions=list(scored.predictions),
      search=described_search(search),
      num_truncated=examples.num_truncated,
      num_parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
      alignment_error_rates={},
    )

  return evaluate


def described_search(search: Search) -> dict[str, float]:
  """The settings of a search that an `Evaluation` has."""
  return {
    "beam_size": search.beam_size,
    "length_penalty": search.length_penalty,
  }


def _scored_set(
  data: Dataset,
  examples: EvaluationSet,
  tokens: np.ndarray,  # [N, T], the predictions
  losses: np.ndarray,
  num_tokens: np.ndarray,
) -> metrics.ScoredSet:
  """The predictions and references of a set, as tokens and as text."""
  (source, target), text = map(np.asarray, examples.batch), examples.text
  if text:  # The translation of a blank line is a blank line.
    tokens[[not line.strip() for line in text.source]] = PAD
  return metrics.ScoredSet(
    (source != PAD).sum(1) - 1,
    tokens,
    target,
    losses,
    num_tokens,
    data.target_text(tokens),
    text.target if text else data.target_text(target),
  )


def add_alignment_error(
  evaluation: Evaluation,
  experiment: Experiment,
  params: Any,
  examples: EvaluationSet,
) -> Evaluation:
  """Adds alignment error rates; the metric is that of the best head."""
  rates = alignment_error_rates(experiment, params, examples)
  best = {"alignment_error_rate": min(rates.values())} if rates else {}
  return evaluation._replace(
    metrics=evaluation.metrics | best, alignment_error_rates=rates
  )


def make_reference_losses(
  experiment: Experiment,
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
  """Makes (params, source, target) -> losses [N] and numbers of tokens [N]."""
  loss_step = make_loss_step(experiment.model)
  function = BatchFunction(lambda _, *given: loss_step(*given), experiment.mesh)
  rows = num_rows(experiment.mesh)

  def reference_losses(params: Any, source: np.ndarray, target: np.ndarray):
    losses = np.zeros(len(source), np.float32)
    tokens = np.zeros(len(source), np.int32)
    batches = [*by_length(rows, source, target)]
    calls = [Call(None, Batch(*part)) for _, *part in batches]
    function.compile(params, calls)
    for index, result in function.run(params, calls):
      members = batches[index][0]
      losses[members], tokens[members] = (x[: len(members)] for x in result)
    return losses, tokens

  return reference_losses
