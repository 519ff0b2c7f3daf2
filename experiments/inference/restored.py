"""Using a finished run: from its directory alone to answers and scores."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from experiments import checkpoints, experiment
from experiments import run_directory as workdir_lib
from experiments.config import MeshConfig
from experiments.data.batch import UNK
from experiments.data.dataset import EvaluationSet
from experiments.data.text import readers
from experiments.data.text.dataset import TranslationDataset
from experiments.decoding import Constraints
from experiments.decoding.batching import Search
from experiments.errors import UserError
from experiments.evaluation.evaluator import Evaluation, make_evaluator
from experiments.experiment import Run


class Finished(NamedTuple):
  """A run to be used.

  Attributes:
    run: its parts.
    params: the parameters to answer with.
    used: the steps that they come from, for a reader.
  """

  run: Run
  params: Any
  used: str


def restore(workdir: Path, checkpoint: str | None = None) -> Finished:
  """Restores a run from its directory, on the devices that are here.

  Args:
    workdir: the run's directory.
    checkpoint: "last", "best", a step, or "last:10" and "best:10" for the mean
      of ten; None for what the run's config says.

  Returns:
    The run.

  Raises:
    UserError: if there is no run, no such checkpoint, or it is damaged.

  Example:
    >>> finished = restore(Path("runs/reverse"), "best")  # doctest: +SKIP
  """
  workdir_lib.check_links(workdir)
  config = workdir_lib.read_config(workdir)
  if not (workdir / checkpoints.FOLDER).is_dir():
    raise UserError(f"--workdir={workdir}: the run has no checkpoint yet")
  run = experiment.build(config, workdir, mesh=MeshConfig.data_parallel())
  metric = config.train.best_metric
  which = checkpoint or config.evaluation.checkpoint
  with checkpoints.opened(
    workdir, best_metric=metric, read_only=True
  ) as manager:
    try:
      params, used = checkpoints.parameters(
        manager, which, experiment.abstract_state(run), best_metric=metric
      )
    except checkpoints.DamagedCheckpointError as error:
      there = " or ".join(map(str, manager.all_steps()))
      hint = f" There are: --checkpoint={there}." if there else ""
      raise UserError(f"{error}{hint}") from error
  return Finished(run, params, used)


def configured_search(run: Run, **changes) -> Search:
  """Returns how a run's config says to search for answers.

  Args:
    run: the parts of a run.
    **changes: fields of `Search` to set otherwise, and min_length and
      no_repeat_ngram of its constraints; None leaves a field as it is.

  Returns:
    The search.

  Raises:
    UserError: if a value is out of range.

  Example:
    >>> configured_search(run, beam_size=5).beam_size  # doctest: +SKIP
    5
  """
  config = run.config.evaluation
  given = {name: value for name, value in changes.items() if value is not None}
  rules = {
    name: given.pop(name)
    for name in ("min_length", "no_repeat_ngram")
    if name in given
  }
  # A tokeniser's unknown token says nothing; a task's symbols begin there.
  text = isinstance(run.data, TranslationDataset)
  _check_drawing(given)
  # A beam says nothing of what is drawn.
  usual = 1 if given.get("temperature") else config.beam_size
  search = Search(
    beam_size=max(usual, given.get("n_best", 1)),
    length_penalty=config.length_penalty,
    constraints=Constraints(banned=(UNK,) if text else (), **rules),
  )
  search = dataclasses.replace(search, **given)
  limit = search.max_length or run.data.max_length
  if limit > run.data.max_length:
    raise UserError(
      f"--max_length={limit}: the model was built for at most"
      f" {run.data.max_length}"
    )
  if search.constraints.min_length >= limit:
    raise UserError(
      f"--min_length={search.constraints.min_length}: must be less than the"
      f" longest answer, {limit}"
    )
  if search.n_best > search.beam_size:
    raise UserError(
      f"--n_best={search.n_best}: needs a --beam_size of at least as much, not"
      f" {search.beam_size}"
    )
  return search


def _check_drawing(given: dict[str, Any]) -> None:
  """Refuses flags that would change nothing."""
  drawn = bool(given.get("temperature"))
  for name in ("beam_size", "n_best"):
    if drawn and given.get(name, 1) > 1:
      raise UserError(
        f"--{name}={given[name]}: what is drawn has no beam; leave out --{name}"
        " or --temperature"
      )
  for name in ("top_k", "seed"):
    if name in given and not drawn:
      raise UserError(
        f"--{name}={given[name]}: changes nothing unless translations are"
        " drawn; add --temperature=1"
      )


def examples(
  run: Run, split: str, source: str | None = None, target: str | None = None
) -> tuple[str, EvaluationSet]:
  """Returns one of a run's evaluation sets, or one made of two files.

  Args:
    run: the parts of a run.
    split: one of `config.data.splits`.
    source: a file, whose lines stand in place of a set.
    target: the file of their translations.

  Returns:
    The set's name, and the set.

  Raises:
    UserError: if there is no such set, or the files do not fit.

  Example:
    >>> name, chosen = examples(run, "test")  # doctest: +SKIP
  """
  if source is None and target is None:
    if split not in run.config.data.splits:
      known = ", ".join(run.config.data.splits)
      raise UserError(f"--split={split}: no such set; there are: {known}")
    return split, run.data.evaluation_set(split)
  if source is None or target is None:
    raise UserError("--source and --target go together; give both")
  if not isinstance(run.data, TranslationDataset):
    raise UserError(
      f"--source: {run.config.data.name} has no text; use --split"
    )
  name = Path(source).name
  if name in run.config.data.splits:
    raise UserError(
      f"--source={source}: {name!r} is the name of one of the run's sets, whose"
      " results it would replace; rename the file"
    )
  text = readers.read_pair(
    Path(source), Path(target), fields=("--source", "--target")
  )
  return name, run.data.encode(text)


def evaluate(
  finished: Finished, chosen: EvaluationSet, search: Search
) -> Evaluation:
  """Evaluates a restored run on a set.

  Args:
    finished: from `restore`.
    chosen: from `examples`.
    search: how to choose an answer.

  Returns:
    Metrics, metrics by length, and the answers.

  Example:
    >>> finished = restore(Path("runs/reverse"))  # doctest: +SKIP
    >>> name, chosen = examples(finished.run, "test")  # doctest: +SKIP
    >>> evaluation = evaluate(finished, chosen, Search())  # doctest: +SKIP
    >>> evaluation.metrics["token_accuracy"]  # doctest: +SKIP
    1.0
  """
  evaluate = make_evaluator(finished.run, search, aligned=True)
  return evaluate(finished.params, chosen)
