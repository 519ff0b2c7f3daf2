"""The training loop, from the first step to the final evaluation."""

import functools
from contextlib import closing, nullcontext
from pathlib import Path
from typing import NamedTuple

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments import run_directory
from experiments.checkpoints.listing import check_processes, last_step
from experiments.data.pipeline import Stream
from experiments.distributed import initialize, mesh, preemption
from experiments.distributed.preemption import StopSignals
from experiments.distributed.watchdog import Watchdog, watch
from experiments.evaluation import Evaluation, make_evaluator, report
from experiments.evaluation.search import configured_search
from experiments.experiment import Experiment
from experiments.optimization.step import TrainState
from experiments.progress import Progress
from experiments.training import trackers
from experiments.training.compile_ahead import Step
from experiments.training.final_evaluation import evaluate_all
from experiments.training.metrics_buffer import MetricsBuffer
from experiments.training.metrics_writer import MetricsWriter
from experiments.training.start import (
  SKIPPED,
  Built,
  OpenManager,
  claim_and_build,
  log_start,
  opened_on_demand,
  start_or_resume,
)
from experiments.training.step_trace import StepTrace


class _Services(NamedTuple):
  """What the steps of a run need besides its state and its batches."""

  experiment: Experiment
  workdir: Path
  manager: OpenManager
  signals: StopSignals
  watchdog: Watchdog
  trace: StepTrace


class _Result(NamedTuple):
  """What the steps of this process end with."""

  state: TrainState
  is_complete: bool
  validation: Evaluation | None  # of `state`, if the last step evaluated it
  num_steps: int  # of this process


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
  check_processes(workdir)
  if first_process:
    run_directory.check_access(workdir)
    run_directory.check_no_export(workdir)
  typed = run_directory.effective_config(workdir, raw)
  lock = run_directory.locked(workdir) if first_process else nullcontext()
  with (
    preemption.listen() as signals,
    watch(typed.train.stall_seconds) as watchdog,
    lock,
  ):
    built = claim_and_build(raw, typed, workdir)
    with opened_on_demand(workdir, typed.train) as manager:
      trace = StepTrace(workdir, profile if first_process else 0)
      services = _Services(
        built.experiment, workdir, manager, signals, watchdog, trace
      )
      with closing(trace):
        result = _train(services, built)
      manager().wait()
      if not result.is_complete:
        step = int(result.state.step)
        logging.info("stopped after step %d; the same command resumes it", step)
        return False
      signals.nothing_to_save()
      return evaluate_all(
        built.experiment,
        workdir,
        manager(),
        signals,
        result.state,
        result.validation,
        is_new=result.num_steps > 0,
      )


def _train(services: _Services, built: Built) -> _Result:
  """Trains until the last step, early stopping or a signal."""
  experiment = services.experiment
  config = experiment.config.train
  # Several processes open the checkpoints together.
  is_new = last_step(services.workdir) is None and jax.process_count() == 1
  state, stream, skipped = start_or_resume(
    built, services.manager, is_new=is_new
  )
  log_start(built, state, services.workdir)
  first = int(state.step)
  tracker = functools.partial(
    trackers.make_tracker, experiment.config, services.workdir, first
  )
  with (
    closing(MetricsWriter(services.workdir, first, tracker)) as writer,
    Progress(config.steps, first) as progress,
  ):
    explain = functools.partial(_explain, experiment, services.manager)
    buffer = MetricsBuffer(writer, progress, config, explain, skipped)
    result = _run_steps(services, built.train_step, state, stream, buffer)
    if buffer.skipped:
      progress.write(f"{buffer.skipped} non-finite updates were skipped")
  return result


def _run_steps(
  services: _Services,
  train_step: Step,
  state: TrainState,
  stream: Stream,
  buffer: MetricsBuffer,
) -> _Result:
  """Trains from a state until the last step, early stopping or a signal."""
  config, first = services.experiment.config.train, int(state.step)
  writer, progress = buffer.writer, buffer.progress
  step = first
  validate, validation = _make_validate(services.experiment), None
  # A signal before the first step leaves nothing new to save.
  stop = services.signals.should_stop(step)
  complete = _is_complete(services, step, progress)
  if complete:
    logging.info("training is complete after step %d", step)
  elif step:
    logging.info("resuming after step %d", step)
  if not (stop or complete):
    logging.info("compiling the training step")
  while not (stop or complete):
    step += 1
    batch = mesh.shard_batch(next(stream), services.experiment.mesh)
    services.watchdog.step = step
    with services.trace.step(step):
      state, metrics = train_step(state, batch)
    services.trace.after(metrics)
    buffer.push(step, metrics)
    stop, validation = services.signals.should_stop(step), None
    if stop or config.saves_at(step):
      buffer.drain()
      if step == config.steps or step % config.eval_every == 0:
        validation = validate(state)
        _write_validation(validation, step, writer, progress)
      writer.upload()
      _save(services.manager(), state, stream, buffer.skipped, validation)
      peak = {"peak_memory": initialize.peak_memory()}
      writer.timings(step, "train", progress.timings() | peak)
    complete = _is_complete(services, step, progress)
  services.watchdog.step = None
  return _Result(state, complete, validation, step - first)


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
  name = f"validation ({report.search_name(validation)})"
  progress.write(f"step {step}: {name}: {report.summary(validation)}")


def _save(manager, state, stream, skipped: int, validation: Evaluation | None):
  position = stream.get_state()
  if skipped:
    position = {**position, SKIPPED: skipped}
  scores = validation.metrics if validation else None
  manager.save_state(state, position, scores)


def _is_complete(services: _Services, step: int, progress: Progress) -> bool:
  """Whether training ends after a step: at the last one, or early."""
  config = services.experiment.config.train
  if step == config.steps:
    return True
  # A new run has no checkpoint, and need not import what opens them.
  best = services.manager().best_step() if config.patience and step else None
  if best is None or step - best < config.patience * config.eval_every:
    return False
  progress.write(
    f"step {step}: early stopping: {config.best_metric} has not improved for"
    f" {config.patience} evaluations"
  )
  return True


def _explain(experiment: Experiment, manager: OpenManager, step: int) -> str:
  """Describes the batch of a non-finite step, and what to do."""
  folder, last = manager().folder, manager().latest_step()
  clips = experiment.config.optimizer.clip_norm is not None
  other = "" if clips else " or set config.optimizer.clip_norm"
  good = "none yet" if last is None else str(folder / str(last))
  return (
    f"its batch is number {step - 1} of seed {experiment.config.seed}. Last"
    f" good checkpoint: {good}. Lower config.optimizer.learning_rate{other},"
    " in another --workdir."
  )
