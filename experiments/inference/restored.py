"""Evaluates a restored run."""

from pathlib import Path

from experiments.checkpoints.restore_run import Restored
from experiments.data.dataset import EvaluationSet
from experiments.data.text import readers
from experiments.data.text.dataset import TranslationDataset
from experiments.decoding.batching import Search
from experiments.errors import UserError, suggestion
from experiments.evaluation import Evaluation, make_evaluator
from experiments.evaluation.evaluator import add_alignment_error
from experiments.experiment import Experiment


def evaluation_set(
  experiment: Experiment,
  split: str,
  source: str | None = None,
  target: str | None = None,
) -> tuple[str, EvaluationSet]:
  """Returns an evaluation set of a run, or one made of two files.

  Args:
    experiment: provides the sets and the tokenizers.
    split: one of `config.data.splits`; ignored if files are given.
    source: a file of source lines.
    target: the file of their references.

  Returns:
    The name of the set, and the set.

  Raises:
    UserError: if there is no such set, or the files do not fit each other.
  """
  splits = experiment.config.data.splits
  if source is None and target is None:
    check_split(experiment, split)
    return split, experiment.data.evaluation_set(split)
  if source is None or target is None:
    raise UserError("--source and --target go together; give both")
  if not isinstance(experiment.data, TranslationDataset):
    raise UserError(
      f"--source: {experiment.config.data.name} has no text; use --split"
    )
  name = Path(source).name
  if name in splits:
    raise UserError(
      f"--source={source}: {name!r} is the name of one of the run's sets, whose"
      " results it would replace; rename the file"
    )
  text = readers.read_pair(
    Path(source), Path(target), fields=("--source", "--target")
  )
  return name, experiment.data.encode(text)


def check_split(experiment: Experiment, split: str) -> None:
  """Raises UserError if a run has no evaluation set of this name."""
  splits = experiment.config.data.splits
  if split not in splits:
    known = ", ".join(splits)
    raise UserError(
      f"--split={split}: no such set; there are: {known}"
      f"{suggestion(split, splits)}"
    )


def evaluate(
  restored: Restored, examples: EvaluationSet, search: Search
) -> Evaluation:
  """Evaluates a restored run, alignment error included.

  Args:
    restored: from `restore`.
    examples: from `evaluation_set`.
    search: the decoding settings, from `evaluation.search.configured_search`.

  Returns:
    Metrics, metrics by length, and predictions.
  """
  experiment, params, _ = restored
  evaluation = make_evaluator(experiment, search)(params, examples)
  return add_alignment_error(evaluation, experiment, params, examples)
