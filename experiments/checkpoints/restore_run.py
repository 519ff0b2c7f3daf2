"""The experiment of a run directory, and its parameters."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from experiments import run_directory
from experiments.checkpoints import parameter_file
from experiments.checkpoints.damage import DamagedCheckpointError
from experiments.checkpoints.manager import opened
from experiments.checkpoints.read import parameters
from experiments.config import Config, MeshConfig
from experiments.errors import UserError
from experiments.experiment import Experiment, make_experiment


class Restored(NamedTuple):
  """A trained run.

  Attributes:
    experiment: its config, mesh, data and model.
    params: the parameters of the selected checkpoints.
    checkpoint: a description of these checkpoints.
  """

  experiment: Experiment
  params: Any
  checkpoint: str


def restore(workdir: Path, checkpoint: str | None = None) -> Restored:
  """Restores a run on all local devices, whatever devices it was trained on.

  Args:
    workdir: the run directory, or the folder of an export.
    checkpoint: "last", "best", a step, or "last:10" and "best:10" for the mean
      of ten; None for `config.evaluation.checkpoint`.

  Returns:
    The restored run.

  Raises:
    UserError: if there is no run, no such checkpoint, or it is damaged.

  Example:
    >>> restore(Path("nowhere"), "best")
    Traceback (most recent call last):
    experiments.errors.NoRunError: --workdir=nowhere: not a run directory...
  """
  run_directory.check_access(workdir)
  config = _for_any_device(run_directory.read_config(workdir))
  exported = workdir / run_directory.PARAMETERS
  if (workdir / run_directory.CHECKPOINTS).is_dir():
    experiment = make_experiment(config, workdir, mesh=MeshConfig())
    which = checkpoint
    if which is None:
      which = config.evaluation.checkpoint
    return Restored(experiment, *_from_checkpoints(experiment, workdir, which))
  if not exported.exists():
    raise UserError(f"--workdir={workdir}: the run has no checkpoint yet")
  if checkpoint is not None:
    raise UserError(
      f"--checkpoint={checkpoint}: {workdir} is an export, which has one set of"
      " parameters; leave out --checkpoint"
    )
  experiment = make_experiment(config, workdir, mesh=MeshConfig())
  like = experiment.abstract_state.params
  return Restored(experiment, *parameter_file.restore(exported, like))


def _for_any_device(config: Config) -> Config:
  """The config without an implementation of attention for one platform."""
  model = config.model.model_copy(update={"attention_implementation": "auto"})
  return config.model_copy(update={"model": model})


def _from_checkpoints(
  experiment: Experiment, workdir: Path, which: str
) -> tuple[Any, str]:
  train = experiment.config.train
  with (
    _without_warnings_of_orbax(),
    opened(workdir, train, read_only=True) as manager,
  ):
    try:
      return parameters(manager, which, experiment.abstract_state, train)
    except DamagedCheckpointError as error:
      others = [each for each in manager.all_steps() if each != error.step]
      steps = " or ".join(map(str, others))
      hint = f" Other steps: --checkpoint={steps}." if steps else ""
      raise UserError(f"{error}{hint}") from error


@contextlib.contextmanager
def _without_warnings_of_orbax() -> Iterator[None]:
  """Hides, for instance, that a directory opened for reading is read-only."""

  def is_shown(record):
    return record.levelname != "WARNING" or "orbax" not in record.pathname

  logger = logging.get_absl_logger()
  logger.addFilter(is_shown)
  try:
    yield
  finally:
    logger.removeFilter(is_shown)
