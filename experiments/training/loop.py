"""The training loop, from the first step to the final evaluation."""

import functools
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments import checkpoints, run_directory
from experiments.config import Config, Seq2SeqConfig
from experiments.data import pipeline
from experiments.data.dataset import TrainingBatches
from experiments.distributed import (
  initialize,
  mesh,
  preemption,
  sharding,
  watchdog,
)
from experiments.evaluation import Evaluation, make_evaluator, report
from experiments.evaluation.search import configured_search
from experiments.experiment import Experiment, make_experiment
from experiments.optimization.step import TrainState
from experiments.progress import Progress
from experiments.training import trackers
from experiments.training.compile_ahead import make_train_step
from experiments.training.final_evaluation import evaluate_all
from experiments.training.metrics_buffer import MetricsBuffer
from experiments.training.metrics_writer import MetricsWriter
from experiments.training.step_trace import StepTrace

OpenManager = Callable[[], Any]  # opens the checkpoints when first called
_SKIPPED = "skipped_updates"  # in a checkpoint, beside the data position


def train_and_evaluate(
  config: ConfigDict, workdir: str | Path, *, profile: int = 0
) -> bool:
  """Trains a run to its end, resuming from its last checkpoint, if any.

  The first process traces `profile` steps to the folder `profile` of the run.

  Returns:
    True if the run is complete; False if a signal stopped it, and the same call
    will resume it.

  Raises:
    UserError: for problems that the user can solve.
  """
  raw, workdir = config.to_dict(), run_directory.run_path(workdir)
  first_process = jax.process_index() == 0
  if first_process:
    run_directory.check_access(workdir)
  typed = run_directory.effective_config(workdir, raw)
  lock = run_directory.locked(workdir) if first_process else nullcontext()
  with (
    preemption.listen() as requests,
    watchdog.watch(typed.train.stall_seconds) as heartbeat,
    lock,
  ):
    experiment, batches, initial = _prepare(raw, typed, workdir)
    with checkpoints.opened_on_demand(workdir, typed.train) as manager:
      trace = StepTrace(workdir, profile if first_process else 0)
      with closing(trace):
        state, complete, validation = _train(
          experiment,
          batches,
          initial,
          workdir,
          manager,
          requests,
          heartbeat,
          trace,
        )
      checkpoints.wait(manager())
      if not complete:
        step = int(state.step)
        logging.info("stopped after step %d; the same command resumes it", step)
        return False
      requests.nothing_to_save()
      return evaluate_all(
        experiment, workdir, manager(), requests, state, validation
      )


def _prepare(
  raw, config: Config, workdir: Path
) -> tuple[Experiment, TrainingBatches, TrainState | None]:
  """Claims the run directory, and releases it if the config does not fit."""
  first_process = jax.process_index() == 0
  claimed = first_process and run_directory.claim(workdir, raw)
  if first_process:
    run_directory.note_versions(workdir)
  try:
    experiment = make_experiment(config, workdir, train=True)
    batches = experiment.training_batches()
    trackers.check(config.train.tracker)
    # A run with a checkpoint resumes from it.
    warm = config.train.init_from and checkpoints.last_step(workdir) is None
    initial = checkpoints.warm_started(experiment) if warm else None
    return experiment, batches, initial
  except BaseException:
    if claimed:
      run_directory.release(workdir)
    raise


def _start_or_resume(
  experiment: Experiment,
  batches: TrainingBatches,
  initial: TrainState | None,  # of a warm start
  manager: OpenManager,
  *,
  is_new: bool,  # no checkpoint was written
) -> tuple[TrainState, Any, int]:
  """Returns the state, the next batches and the number of skipped updates."""
  stream = pipeline.Stream(batches, experiment.config.train.steps)
  last = None
  if not is_new:
    like = experiment.abstract_state()
    last = checkpoints.restore_last(manager(), like)
  if last is None:
    return initial or experiment.initial_state(), stream, 0
  state, saved = last
  position = dict(saved)
  skipped = position.pop(_SKIPPED, 0)
  stream.set_state(position)
  logging.info("resuming after step %d", int(state.step))
  return state, stream, skipped


def _train(
  experiment: Experiment,
  batches: TrainingBatches,
  initial: TrainState | None,
  workdir: Path,
  manager: OpenManager,
  requests: preemption.Requests,
  heartbeat: watchdog.Watchdog,
  trace: StepTrace,
) -> tuple[TrainState, bool, Evaluation | None]:
  """Trains until the last step, early stopping or a signal."""
  config = experiment.config.train
  last = checkpoints.last_step(workdir)
  train_step = make_train_step(experiment, batches, last or 0)
  # Several processes open the checkpoints together.
  is_new = last is None and jax.process_count() == 1
  state, stream, skipped = _start_or_resume(
    experiment, batches, initial, manager, is_new=is_new
  )
  _log_start(experiment, batches, state, workdir)
  first = step = int(state.step)
  validate = _make_validate(experiment)
  validation = None
  tracker = functools.partial(
    trackers.make_tracker, experiment.config, workdir, first
  )
  with (
    closing(MetricsWriter(workdir, first, tracker)) as writer,
    Progress(config.steps, first) as progress,
  ):
    explain = functools.partial(_explain, experiment, manager)
    buffer = MetricsBuffer(writer, progress, config, explain, skipped)
    # A signal before the first step leaves nothing new to save.
    stop = requests.should_stop(first)
    complete = _is_complete(experiment, manager, first, progress)
    while not (stop or complete):
      step += 1
      batch = mesh.shard_batch(next(stream), experiment.mesh)
      heartbeat.step = step
      with trace.step(step):
        state, metrics = train_step(state, batch)
      trace.after(metrics)
      buffer.push(step, metrics)
      stop, validation = requests.should_stop(step), None
      if stop or config.saves_at(step):
        buffer.drain()
        if step == config.steps or step % config.eval_every == 0:
          validation = validate(state)
          _write_validation(validation, step, writer, progress)
        writer.upload()
        _save(manager(), state, stream, buffer.skipped, validation)
        peak = {"peak_memory": initialize.peak_memory()}
        writer.timings(step, "train", progress.timings() | peak)
      complete = _is_complete(experiment, manager, step, progress)
    heartbeat.step = None
    if buffer.skipped:
      progress.write(f"{buffer.skipped} non-finite updates were skipped")
  # `complete` is False after a signal; `validation` evaluates this state.
  return state, complete, validation


def _make_validate(experiment: Experiment):
  """Makes a function that evaluates a state greedily on the validation set."""
  search = configured_search(experiment, beam_size=1)
  evaluate = make_evaluator(experiment, search)
  examples = experiment.data.evaluation_set("validation")
  return lambda state: evaluate(
    mesh.all_gather(state.evaluated, experiment.mesh), examples
  )


def _write_validation(validation: Evaluation, step: int, writer, progress):
  scores = dict(validation.metrics)
  # In another file, because metrics.jsonl is reproducible.
  speed = scores.pop("sentences_per_second")
  writer.metrics(step, "validation", scores)
  writer.timings(step, "validation", {"sentences_per_second": speed})
  progress.write(f"step {step}: {report.summary(validation)}")


def _save(manager, state, stream, skipped: int, validation: Evaluation | None):
  position = stream.get_state()
  if skipped:
    position = {**position, _SKIPPED: skipped}
  scores = validation.metrics if validation else None
  checkpoints.save(manager, state, position, scores)


def _is_complete(
  experiment: Experiment, manager: OpenManager, step: int, progress
) -> bool:
  """Whether training ends after a step: at the last one, or early."""
  config = experiment.config.train
  if step == config.steps:
    return True
  # A new run has no checkpoint, and need not import what opens them.
  best = manager().best_step() if config.patience and step else None
  if best is None or step - best < config.patience * config.eval_every:
    return False
  progress.write(
    f"step {step}: early stopping: {config.best_metric} has not improved for"
    f" {config.patience} evaluations"
  )
  return True


def _explain(experiment: Experiment, manager: OpenManager, step: int) -> str:
  """Describes the batch of a non-finite step, and what to do."""
  directory, last = manager().directory, manager().latest_step()
  good = "none yet" if last is None else str(directory / str(last))
  return (
    f"its batch is number {step - 1} of seed {experiment.config.seed}. Last"
    f" good checkpoint: {good}. Lower config.optimizer.learning_rate or set"
    " config.optimizer.clip_norm, in another --workdir."
  )


def _log_start(
  experiment: Experiment,
  batches: TrainingBatches,
  state: TrainState,
  workdir: Path,
) -> None:
  config, devices = experiment.config, experiment.mesh.devices.size
  model = config.model
  score = model.attention if isinstance(model, Seq2SeqConfig) else model.score
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  for line in (
    f"{config.data.name}: {model.name} ({score}), {parameters:,}"
    f" parameters, {devices} {jax.devices()[0].platform} device(s)",
    *sharding.describe(state, experiment.mesh),
    *batches.describe(),
    f"in {workdir}",
  ):
    logging.info("%s", line)
