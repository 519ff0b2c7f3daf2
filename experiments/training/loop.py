"""The training loop, from the first step to the final evaluation."""

import functools
import time
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments import checkpoints, run_directory
from experiments.config import Config, Seq2SeqConfig
from experiments.data import pipeline
from experiments.data.synthetic.dataset import SyntheticDataset
from experiments.distributed import (
  initialize,
  mesh,
  preemption,
  sharding,
  watchdog,
)
from experiments.evaluation import (
  Evaluation,
  make_evaluator,
  report,
)
from experiments.evaluation.alignment_error import make_aligner
from experiments.evaluation.evaluator import add_alignment_error
from experiments.evaluation.search import configured_search
from experiments.experiment import Experiment, make_experiment
from experiments.optimization.step import TrainState
from experiments.progress import Progress
from experiments.training.metrics_buffer import MetricsBuffer
from experiments.training.metrics_writer import MetricsWriter
from experiments.visualization import plots
from experiments.visualization.alignments import draw_alignments

_SKIPPED = "skipped_updates"  # in a checkpoint, beside the data position


class _Start(NamedTuple):
  state: TrainState
  stream: Any  # of the batches that follow
  skipped: int  # number of non-finite updates before


class _End(NamedTuple):
  state: TrainState
  complete: bool  # False if a signal stopped training
  validation: Evaluation | None  # of this state


def train_and_evaluate(config: ConfigDict, workdir: str | Path) -> bool:
  """Trains a run to its end, resuming from its last checkpoint, if any.

  Args:
    config: from a file in `configs/`.
    workdir: the run directory; `experiments.run_directory` lists its files.

  Returns:
    True if the run is complete; False if a signal stopped it, and the same call
    will resume it.

  Raises:
    UserError: for problems that the user can solve.
  """
  raw, workdir = config.to_dict(), Path(workdir)
  first_process = jax.process_index() == 0
  if first_process:
    run_directory.check_links(workdir)
  typed = run_directory.effective_config(workdir, raw)
  lock = run_directory.locked(workdir) if first_process else nullcontext()
  with (
    preemption.listen() as requests,
    watchdog.watch(typed.train.stall_seconds) as heartbeat,
    lock,
  ):
    return _train_and_evaluate(raw, typed, workdir, requests, heartbeat)


def _train_and_evaluate(
  raw, typed: Config, workdir: Path, requests, heartbeat
) -> bool:
  first_process = jax.process_index() == 0
  claimed = first_process and run_directory.claim(workdir, raw)
  if first_process:
    run_directory.note_versions(workdir)
  try:
    experiment = make_experiment(typed, workdir, train=True)
    batches = experiment.training_batches()
  except BaseException:
    if claimed:
      run_directory.release(workdir)
    raise
  with checkpoints.opened(workdir, typed.train) as manager:
    start = _start_or_resume(experiment, manager, batches)
    for line in (
      _describe(experiment, start.state),
      *sharding.describe(start.state, experiment.mesh),
      *batches.describe(),
      f"in {workdir}",
    ):
      logging.info("%s", line)
    end = _train(experiment, workdir, manager, requests, heartbeat, start)
    checkpoints.wait(manager)
    if not end.complete:
      logging.info(
        "stopped after step %d; the same command resumes it",
        int(end.state.step),
      )
      return False
    requests.nothing_to_save()
    return _evaluate_all(experiment, workdir, manager, requests, end)


def _start_or_resume(experiment: Experiment, manager, batches) -> _Start:
  stream = pipeline.stream(batches, experiment.config.train.steps)
  last = checkpoints.restore_last(manager, experiment.abstract_state())
  if last is None:
    return _Start(experiment.initial_state(), stream, skipped=0)
  state, saved = last
  position = dict(saved)
  skipped = position.pop(_SKIPPED, 0)
  stream.set_state(position)
  logging.info("resuming after step %d", int(state.step))
  return _Start(state, stream, skipped)


def _train(
  experiment: Experiment,
  workdir: Path,
  manager,
  requests,
  heartbeat,
  start: _Start,
) -> _End:
  """Trains until the last step, early stopping or a signal."""
  config, (state, stream, skipped) = experiment.config.train, start
  evaluate = make_evaluator(
    experiment, configured_search(experiment, beam_size=1)
  )
  validation_set = experiment.data.evaluation_set("validation")
  train_step = experiment.train_step(state)
  first, begin = int(state.step), time.perf_counter()
  complete = first == config.steps or _stops_early(experiment, manager, first)
  validation = None
  with (
    closing(
      MetricsWriter(workdir, first, active=jax.process_index() == 0)
    ) as writer,
    Progress(config.steps, first) as progress,
  ):
    buffer = MetricsBuffer(
      writer,
      progress,
      log_every=config.log_every,
      explain=functools.partial(_explain, experiment, manager),
      skips=config.non_finite == "skip",
      skipped=skipped,
    )
    # A signal before the first step leaves nothing new to save.
    last = config.steps
    if requests.should_stop(first) or complete:
      last = first
    for step in range(first + 1, last + 1):
      batch = mesh.shard_batch(next(stream), experiment.mesh)
      heartbeat.step = step
      state, metrics = train_step(state, batch)
      buffer.push(step, metrics)
      stop = requests.should_stop(step)
      validation = scores = None
      complete = step == config.steps
      if step == first + 1:
        # Before the buffer writes, which imports TensorBoard.
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - begin
        writer.timings(step, "train", {"first_step_seconds": seconds})
      if complete or step % config.eval_every == 0:
        buffer.drain()
        params = mesh.all_gather(state.evaluated, experiment.mesh)
        validation = evaluate(params, validation_set)
        scores = dict(validation.metrics)  # without the time: reproducible
        speed = scores.pop("sentences_per_second")
        writer.metrics(step, "validation", scores)
        writer.timings(step, "validation", {"sentences_per_second": speed})
        progress.write(f"step {step}: {report.summary(validation)}")
      if validation or stop or config.saves_at(step):
        buffer.drain()
        _save(manager, state, stream, buffer.skipped, scores)
        peak = {"peak_memory": initialize.peak_memory()}
        writer.timings(step, "train", progress.timings() | peak)
      if validation and _stops_early(experiment, manager, step):
        progress.write(
          f"step {step}: early stopping: {config.best_metric} has not improved"
          f" for {config.patience} evaluations"
        )
        complete = True
      if stop or complete:
        break
    heartbeat.step = None
    if buffer.skipped:
      progress.write(f"{buffer.skipped} non-finite updates were skipped")
  return _End(state, complete, validation)


def _save(manager, state, stream, skipped: int, scores) -> None:
  position = stream.get_state()
  if skipped:
    position = {**position, _SKIPPED: skipped}
  checkpoints.save(manager, state, position, scores)


def _stops_early(experiment: Experiment, manager, step: int) -> bool:
  """Whether the best checkpoint is `patience` evaluations old."""
  config, best = experiment.config.train, manager.best_step()
  if not config.patience or best is None:
    return False
  return step - best >= config.patience * config.eval_every


def _explain(experiment: Experiment, manager, step: int) -> str:
  """Describes the batch of a non-finite step, and what to do."""
  last = manager.latest_step()
  good = "none yet" if last is None else str(manager.directory / str(last))
  return (
    f"its batch is number {step - 1} of seed {experiment.config.seed}. Last"
    f" good checkpoint: {good}. Lower config.optimizer.learning_rate or set"
    " config.optimizer.clip_norm, in another --workdir."
  )


def _evaluate_all(
  experiment: Experiment, workdir: Path, manager, requests, end: _End
) -> bool:
  """Evaluates every set and writes results; returns False on a signal."""
  step, train = int(end.state.step), experiment.config.train
  params, used = checkpoints.parameters(
    manager,
    experiment.config.evaluation.checkpoint,
    experiment.abstract_state(),
    train,
    state=end.state,
  )
  params = mesh.all_gather(params, experiment.mesh)
  search = configured_search(experiment)
  evaluate = make_evaluator(experiment, search)
  align = make_aligner(experiment)
  greedy = configured_search(experiment, beam_size=1)
  same = (used, search) == (f"step {step}", greedy)
  curves = {}
  for number, split in enumerate(experiment.config.data.splits, start=1):
    if requests.should_stop(step + number):
      return False
    examples = experiment.data.evaluation_set(split)
    if same and split == "validation" and end.validation:
      evaluation = end.validation
    else:
      evaluation = evaluate(params, examples)
    evaluation = add_alignment_error(evaluation, align(params, examples))
    curves[split] = evaluation.by_length
    if jax.process_index() == 0:
      print(report.described(split, evaluation), end="\n\n", flush=True)
      report.write_evaluation(workdir, split, used, evaluation)
  examples = experiment.data.evaluation_set("validation")
  figure = draw_alignments(workdir, "validation", experiment, params, examples)
  if jax.process_index() == 0:
    plots.save_accuracy_by_length(
      curves,
      workdir / "figures" / "accuracy_by_length.png",
      # In tokens, without EOS.
      trained_length=experiment.data.task.batch_lengths[0] - 1
      if isinstance(experiment.data, SyntheticDataset)
      else None,
    )
    print(f"alignments: {figure}\nrun: {workdir}", flush=True)
  return True


def _describe(experiment: Experiment, state: TrainState) -> str:
  config, devices = experiment.config, experiment.mesh.devices.size
  model = config.model
  score = model.attention if isinstance(model, Seq2SeqConfig) else model.score
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  return (
    f"{config.data.name}: {model.name} ({score}), {parameters:,}"
    f" parameters, {devices} {jax.devices()[0].platform} device(s)"
  )
