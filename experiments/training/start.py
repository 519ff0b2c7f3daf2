"""The start of a run: its directory, experiment, state and first batch."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging

from experiments import run_directory
from experiments.checkpoints.listing import last_step
from experiments.config import Config, TrainConfig
from experiments.data.dataset import TrainingBatches
from experiments.data.pipeline import Stream
from experiments.distributed import sharding
from experiments.experiment import Experiment, make_experiment
from experiments.optimization.step import TrainState
from experiments.training import trackers
from experiments.training.compile_ahead import Step, compile_train_step

OpenManager = Callable[[], Any]  # opens the checkpoints when first called
SKIPPED = "skipped_updates"  # in a checkpoint, beside the data position


class Built(NamedTuple):
  """What a run is made of before its first step."""

  experiment: Experiment
  batches: TrainingBatches
  train_step: Step
  initial: TrainState | None  # of a warm start


def claim_and_build(raw, config: Config, workdir: Path) -> Built:
  """Claims the run directory, and releases it if the config does not fit."""
  first_process = jax.process_index() == 0
  claimed = first_process and run_directory.claim(workdir, raw)
  if first_process:
    run_directory.note_versions(workdir)
  try:
    return _built(config, workdir)
  except BaseException:
    if claimed:
      run_directory.release(workdir)
    raise


def _built(config: Config, workdir: Path) -> Built:
  trackers.check(config.train.tracker)
  last, initial = last_step(workdir), None
  experiment = make_experiment(config, workdir, train=True)
  batches = experiment.training_batches()
  # A run with a checkpoint resumes from it.
  if config.train.init_from and last is None:
    from experiments.checkpoints.warm_start import warm_started

    initial = warm_started(experiment)
  # Tracing the step finds what the model does not support.
  train_step = compile_train_step(experiment, batches, last or 0)
  return Built(experiment, batches, train_step, initial)


def start_or_resume(
  built: Built,
  manager: OpenManager,
  *,
  is_new: bool,  # no checkpoint was written
) -> tuple[TrainState, Stream, int]:
  """Returns the state, the next batches and the number of skipped updates."""
  experiment = built.experiment
  stream = Stream(built.batches, experiment.config.train.steps)
  last = None
  if not is_new:
    from experiments.checkpoints.read import restore_last

    last = restore_last(manager(), experiment.abstract_state)
  if last is None:
    return built.initial or experiment.initial_state(), stream, 0
  state, saved = last
  position = dict(saved)
  skipped = position.pop(SKIPPED, 0)
  stream.set_state(position)
  return state, stream, skipped


@contextlib.contextmanager
def opened_on_demand(
  workdir: Path, config: TrainConfig
) -> Iterator[OpenManager]:
  """Yields a function that opens the checkpoints when it is first called."""
  with contextlib.ExitStack() as stack:

    @functools.cache
    def manager() -> Any:
      # Orbax takes half a second to import, and a new run needs it late.
      from experiments.checkpoints.manager import opened

      return stack.enter_context(opened(workdir, config))

    yield manager


def log_start(built: Built, state: TrainState, workdir: Path) -> None:
  """Logs what is trained, on which devices and batches."""
  experiment = built.experiment
  config, devices = experiment.config, experiment.mesh.devices.size
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  for line in (
    f"{config.title}, {parameters:,} parameters, {devices}"
    f" {jax.devices()[0].platform} device(s)",
    *sharding.describe(state, experiment.mesh),
    *built.batches.describe(),
    f"in {workdir}",
  ):
    logging.info("%s", line)
