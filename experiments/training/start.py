"""The start of a run: its directory, experiment, state and first batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import logging

from experiments import run_directory
from experiments.checkpoints.listing import last_step
from experiments.config import Config
from experiments.data.dataset import TrainingBatches
from experiments.data.pipeline import Stream
from experiments.distributed import sharding
from experiments.experiment import Experiment, make_experiment
from experiments.optimization.step import TrainState
from experiments.training import trackers

OpenManager = Callable[[], Any]  # opens the checkpoints when first called
SKIPPED = "skipped_updates"  # in a checkpoint, beside the data position


def claim_and_build(
  raw, config: Config, workdir: Path
) -> tuple[Experiment, TrainingBatches, TrainState | None]:
  """Claims the run directory, and releases it if the config does not fit."""
  first_process = jax.process_index() == 0
  claimed = first_process and run_directory.claim(workdir, raw)
  if first_process:
    run_directory.note_versions(workdir)
  try:
    trackers.check(config.train.tracker)
    experiment = make_experiment(config, workdir, train=True)
    batches = experiment.training_batches()
    # A run with a checkpoint resumes from it.
    if not config.train.init_from or last_step(workdir) is not None:
      return experiment, batches, None
    from experiments.checkpoints.warm_start import warm_started

    return experiment, batches, warm_started(experiment)
  except BaseException:
    if claimed:
      run_directory.release(workdir)
    raise


def start_or_resume(
  experiment: Experiment,
  batches: TrainingBatches,
  initial: TrainState | None,  # of a warm start
  manager: OpenManager,
  *,
  is_new: bool,  # no checkpoint was written
) -> tuple[TrainState, Stream, int]:
  """Returns the state, the next batches and the number of skipped updates."""
  stream = Stream(batches, experiment.config.train.steps)
  last = None
  if not is_new:
    from experiments.checkpoints.read import restore_last

    last = restore_last(manager(), experiment.abstract_state)
  if last is None:
    return initial or experiment.initial_state(), stream, 0
  state, saved = last
  position = dict(saved)
  skipped = position.pop(SKIPPED, 0)
  stream.set_state(position)
  return state, stream, skipped


def log_start(
  experiment: Experiment,
  batches: TrainingBatches,
  state: TrainState,
  workdir: Path,
) -> None:
  """Logs what is trained, on which devices and batches."""
  config, devices = experiment.config, experiment.mesh.devices.size
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  for line in (
    f"{config.title}, {parameters:,} parameters, {devices}"
    f" {jax.devices()[0].platform} device(s)",
    *sharding.describe(state, experiment.mesh),
    *batches.describe(),
    f"in {workdir}",
  ):
    logging.info("%s", line)
