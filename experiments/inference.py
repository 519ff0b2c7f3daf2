"""Using a finished run: from its directory alone to answers and scores."""

from contextlib import closing
from pathlib import Path

from experiments import checkpoints, runs
from experiments import workdir as workdir_lib
from experiments.errors import UserError
from experiments.evaluation import Evaluation, make_evaluator
from experiments.runs import Run
from experiments.steps import TrainState


def restore(workdir: Path, checkpoint: str = "last") -> tuple[Run, TrainState]:
  """Restores a run from its directory, on the devices that are here.

  Args:
    workdir: the run's directory.
    checkpoint: "last", "best" or a step.

  Returns:
    The run's parts and the state of the checkpoint.

  Raises:
    UserError: if there is no run, no such checkpoint, or it is damaged.

  Example:
    >>> run, state = restore(Path("runs/reverse"), "best")  # doctest: +SKIP
  """
  run = runs.build(workdir_lib.read_config(workdir), devices=-1)
  if not (workdir / checkpoints.FOLDER).is_dir():
    raise UserError(f"--workdir={workdir}: the run has no checkpoint yet")
  manager = checkpoints.open_manager(
    workdir, best_metric=run.config.train.best_metric, read_only=True
  )
  with closing(manager):
    step = checkpoints.choose(manager, checkpoint)
    try:
      state, _ = checkpoints.restore(manager, step, runs.abstract_state(run))
    except checkpoints.DamagedCheckpointError as error:
      others = [str(each) for each in manager.all_steps() if each != step]
      hint = f" Others: --checkpoint={' or '.join(others)}." if others else ""
      raise UserError(f"{error}{hint}") from error
  return run, state


def evaluate(run: Run, state: TrainState, split: str) -> Evaluation:
  """Evaluates a restored run on one of its sets.

  Args:
    run: from `restore`.
    state: from `restore`.
    split: one of `config.data.splits`.

  Returns:
    Metrics, metrics by length, and the answers.

  Raises:
    UserError: if there is no such set.

  Example:
    >>> run, state = restore(Path("runs/reverse"))  # doctest: +SKIP
    >>> evaluation = evaluate(run, state, "test")  # doctest: +SKIP
    >>> evaluation.metrics["token_accuracy"]  # doctest: +SKIP
    1.0
  """
  if split not in run.config.data.splits:
    known = ", ".join(run.config.data.splits)
    raise UserError(f"--split={split}: no such set; there are: {known}")
  examples = runs.evaluation_set(run, split)
  return make_evaluator(run.model, run.mesh)(state.params, examples)
