"""The training loop, from the first step to the final evaluation."""

import functools
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments import run_directory
from experiments.checkpoints.listing import last_step
from experiments.checkpoints.on_demand import opened_on_demand
from experiments.config import Config, Seq2SeqConfig
from experiments.data.dataset import TrainingBatches
from experiments.data.pipeline import Stream
from experiments.distributed import initialize, mesh, preemption, sharding
from experiments.distributed.preemption import StopSignals
from experiments.distributed.watchdog import Watchdog, watch
from experiments.evaluation import Evaluation, make_evaluator, report
from experiments.evaluation.search import configured_search
from experiments.experiment import Experiment, make_experiment
from experiments.optimization.step import TrainState
from experiments.progress import Progress
from experiments.training import trackers
from experiments.training.compile_ahead import Step, make_train_step
from experiments.training.final_evaluation import evaluate_all
from experiments.training.metrics_buffer import MetricsBuffer
from experiments.training.metrics_writer import MetricsWriter
from experiments.training.step_trace import StepTrace

OpenManager = Callable[[], Any]  # opens the checkpoints when first called
_SKIPPED = "skipped_updates"  # in a checkpoint, beside the data position


class _Run(NamedTuple):
  """What the steps of a run need besides its state and its batches."""

  experiment: Experiment
  workdir: Path
  manager: OpenManager
  signals: StopSignals
  watchdog: Watchdog
  trace: StepTrace


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
    preemption.listen() as signals,
    watch(typed.train.stall_seconds) as watchdog,
    lock,
  ):
    experiment, batches, initial = _prepare(raw, typed, workdir)
    with opened_on_demand(workdir, typed.train) as manager:
      trace = StepTrace(workdir, profile if first_process else 0)
      run = _Run(experiment, workdir, manager, signals, watchdog, trace)
      with closing(trace):
        state, complete, validation = _train(run, batches, initial)
      _wait(manager())
      if not complete:
        step = int(state.step)
        logging.info("stopped after step %d; the same command resumes it", step)
        return False
      signals.nothing_to_save()
      return evaluate_all(
        experiment, workdir, manager(), signals, state, validation
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
    if not config.train.init_from or last_step(workdir) is not None:
      return experiment, batches, None
    from experiments.checkpoints.warm_start import warm_started

    return experiment, batches, warm_started(experiment)
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
  skipped = position.pop(_SKIPPED, 0)
  stream.set_state(position)
  logging.info("resuming after step %d", int(state.step))
  return state, stream, skipped


def _train(
  run: _Run, batches: TrainingBatches, initial: TrainState | None
) -> tuple[TrainState, bool, Evaluation | None]:
  """Trains until the last step, early stopping or a signal."""
  experiment = run.experiment
  config = experiment.config.train
  last = last_step(run.workdir)
  train_step = make_train_step(experiment, batches, last or 0)
  # Several processes open the checkpoints together.
  is_new = last is None and jax.process_count() == 1
  state, stream, skipped = _start_or_resume(
    experiment, batches, initial, run.manager, is_new=is_new
  )
  _log_start(experiment, batches, state, run.workdir)
  first = int(state.step)
  tracker = functools.partial(
    trackers.make_tracker, experiment.config, run.workdir, first
  )
  with (
    closing(MetricsWriter(run.workdir, first, tracker)) as writer,
    Progress(config.steps, first) as progress,
  ):
    explain = functools.partial(_explain, experiment, run.manager)
    buffer = MetricsBuffer(writer, progress, config, explain, skipped)
    result = _run_steps(
      run, train_step, state, stream, buffer, writer, progress
    )
    if buffer.skipped:
      progress.write(f"{buffer.skipped} non-finite updates were skipped")
  return result


def _run_steps(
  run: _Run,
  train_step: Step,
  state: TrainState,
  stream: Stream,
  buffer: MetricsBuffer,
  writer: MetricsWriter,
  progress: Progress,
) -> tuple[TrainState, bool, Evaluation | None]:
  """Returns a state, whether training is complete, and its validation."""
  config, step = run.experiment.config.train, int(state.step)
  validate, validation = _make_validate(run.experiment), None
  # A signal before the first step leaves nothing new to save.
  stop = run.signals.should_stop(step)
  complete = _is_complete(run, step, progress)
  while not (stop or complete):
    step += 1
    batch = mesh.shard_batch(next(stream), run.experiment.mesh)
    run.watchdog.step = step
    with run.trace.step(step):
      state, metrics = train_step(state, batch)
    run.trace.after(metrics)
    buffer.push(step, metrics)
    stop, validation = run.signals.should_stop(step), None
    if stop or config.saves_at(step):
      buffer.drain()
      if step == config.steps or step % config.eval_every == 0:
        validation = validate(state)
        _write_validation(validation, step, writer, progress)
      writer.upload()
      _save(run.manager(), state, stream, buffer.skipped, validation)
      peak = {"peak_memory": initialize.peak_memory()}
      writer.timings(step, "train", progress.timings() | peak)
    complete = _is_complete(run, step, progress)
  run.watchdog.step = None
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
  from experiments.checkpoints.write import save

  save(manager, state, position, scores)


def _wait(manager) -> None:
  """Waits until the last checkpoint is written."""
  from experiments.checkpoints.write import wait

  wait(manager)


def _is_complete(run: _Run, step: int, progress: Progress) -> bool:
  """Whether training ends after a step: at the last one, or early."""
  config = run.experiment.config.train
  if step == config.steps:
    return True
  # A new run has no checkpoint, and need not import what opens them.
  best = run.manager().best_step() if config.patience and step else None
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
