"""Training from the first step to the last table: the order of things."""

import functools
import time
from pathlib import Path

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments import checkpoints, experiment
from experiments import run_directory as workdir_lib
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
from experiments.evaluation import report
from experiments.evaluation.evaluator import Evaluation, make_evaluator
from experiments.inference import restored
from experiments.progress import Progress
from experiments.training.metrics_buffer import Watch
from experiments.training.metrics_writer import Writer
from experiments.visualization import plots


def train_and_evaluate(config: ConfigDict, workdir: str | Path) -> bool:
  """Trains a run to its end, from wherever it stands, and evaluates it.

  Args:
    config: from a file in `configs/`.
    workdir: the run's directory; `experiments.run_directory` lists its files.

  Returns:
    True when the run is complete; False when it was asked to stop, and the
    same call will go on with it.

  Raises:
    UserError: for whatever the user can put right.

  Example:
    >>> from configs import reverse  # doctest: +SKIP
    >>> config = reverse.get_config("dot")  # doctest: +SKIP
    >>> train_and_evaluate(config, "runs/reverse-dot")  # doctest: +SKIP
    True
  """
  raw, workdir = config.to_dict(), Path(workdir)
  typed = workdir_lib.effective_config(workdir, raw)
  with (
    preemption.listen() as requests,
    watchdog.watch(typed.train.stall_seconds) as beat,
  ):
    if jax.process_index():
      return _train_and_evaluate(raw, typed, workdir, requests, beat)
    workdir_lib.check_links(workdir)
    with workdir_lib.locked(workdir):
      return _train_and_evaluate(raw, typed, workdir, requests, beat)


def _train_and_evaluate(
  raw, typed: Config, workdir: Path, requests, beat
) -> bool:
  first = jax.process_index() == 0
  claimed = first and workdir_lib.claim(workdir, raw)
  if first:
    workdir_lib.note_versions(workdir)
  try:
    run = experiment.build(typed, workdir, train=True)
    batches = experiment.training_batches(run)
  except BaseException:
    if claimed:
      workdir_lib.release(workdir)
    raise
  with checkpoints.opened(
    workdir,
    keep_last=typed.train.keep_last,
    keep_best=typed.train.keep_best,
    best_metric=typed.train.best_metric,
  ) as manager:
    state, stream = _start_or_resume(run, manager, batches)
    told = _describe(run, state), *sharding.table(state, run.mesh)
    for line in (*told, *batches.describe(), f"in {workdir}"):
      logging.info("%s", line)
    state, complete = _train(
      run, workdir, manager, requests, beat, state, stream
    )
    checkpoints.wait(manager)
    if not complete:
      logging.info(
        "stopped after step %d; the same command goes on", int(state.step)
      )
      return False
    requests.nothing_to_save()
    which = typed.evaluation.checkpoint
    params, used = checkpoints.parameters(
      manager,
      which,
      experiment.abstract_state(run),
      best_metric=typed.train.best_metric,
    )
    params, step = mesh.gathered(params, run.mesh), int(state.step)
    return _finish(run, workdir, params, used, requests, step)


def _start_or_resume(run: experiment.Run, manager, batches):
  """Returns the state to go on from and the batches still to come."""
  stream = pipeline.stream(batches, run.config.train.steps)
  restored = checkpoints.restore_last(manager, experiment.abstract_state(run))
  if restored is None:
    return experiment.start(run), stream
  state, position = restored
  stream.set_state(dict(position))
  logging.info("resuming after step %d", int(state.step))
  return state, stream


def _train(
  run: experiment.Run, workdir: Path, manager, requests, beat, state, stream
):
  """Trains until the last step, or until there is a reason to stop.

  Returns:
    The state, and whether training is complete.
  """
  config = run.config.train
  evaluate = make_evaluator(run, restored.configured_search(run, beam_size=1))
  validation = run.data.evaluation_set("validation")
  train_step = experiment.make_step(run, state)

  explain = functools.partial(_explain, run, manager)
  first, begin = int(state.step), time.perf_counter()
  complete = first == config.steps or _is_patience_over(run, manager, first)
  with (
    Writer(workdir, first, active=jax.process_index() == 0) as writer,
    Progress(config.steps, first) as progress,
  ):
    watch = Watch(
      writer,
      progress,
      log_every=config.log_every,
      explain=explain,
      skips=config.non_finite == "skip",
    )
    # Without a step there is nothing new to save.
    stop = requests.should_stop(first)
    last = first if stop or complete else config.steps
    for step in range(first + 1, last + 1):
      batch = mesh.place_rows(next(stream), run.mesh)
      beat.step = step
      state, metrics = train_step(state, batch)
      watch.push(step, metrics)
      stop, scores = requests.should_stop(step), None
      complete = step == config.steps
      if step == first + 1:
        # Before `watch` looks, which imports TensorBoard for that.
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - begin
        writer.timings(step, "train", {"first_step_seconds": seconds})
      if complete or step % config.eval_every == 0:
        watch.drain()
        params = mesh.gathered(state.evaluated, run.mesh)
        evaluation = evaluate(params, validation)
        scores = _write_validation(writer, step, evaluation)
        progress.write(f"step {step}: {report.summary(evaluation)}")
      if scores or stop or step % config.checkpoint_every == 0:
        watch.drain()
        checkpoints.save(manager, state, stream.get_state(), scores)
        timings = {
          **progress.timings(),
          "peak_memory": initialize.peak_memory(),
        }
        writer.timings(step, "train", timings)
      if scores and _is_patience_over(run, manager, step):
        progress.write(
          f"step {step}: no better {config.best_metric} for {config.patience}"
          " looks at the validation set: training ends"
        )
        complete = True
      if stop or complete:
        break
    beat.step = None
    if watch.skipped:
      progress.write(f"{watch.skipped} updates were not finite and skipped")
  return state, complete


def _write_validation(writer: Writer, step: int, evaluation: Evaluation):
  """Writes what came of the validation set, and returns its metrics."""
  scores = dict(evaluation.metrics)
  speed = {"sentences_per_second": scores.pop("sentences_per_second")}
  writer.metrics(step, "validation", scores)
  writer.timings(step, "validation", speed)
  return scores


def _is_patience_over(run: experiment.Run, manager, step: int) -> bool:
  """Whether the best checkpoint is too many evaluations old."""
  config, best = run.config.train, manager.best_step()
  if not config.patience or best is None:
    return False
  return step - best >= config.patience * config.eval_every


def _explain(run: experiment.Run, manager, step: int) -> str:
  """Says of a bad step where its batch stood and what to go back to."""
  last = manager.latest_step()
  good = "none yet" if last is None else str(manager.directory / str(last))
  return (
    f"its batch is number {step - 1} of seed {run.config.seed}. Last good"
    f" checkpoint: {good}. Lower config.optimizer.learning_rate or set"
    " config.optimizer.clip_norm, in another --workdir."
  )


def _finish(
  run: experiment.Run, workdir: Path, params, used: str, requests, step: int
) -> bool:
  """Evaluates every set, and leaves numbers, tables and pictures.

  Returns:
    Whether all is done; False if it was asked to stop.
  """
  curves = {}
  evaluate = make_evaluator(run, restored.configured_search(run), aligned=True)
  for number, split in enumerate(run.config.data.splits, start=1):
    if requests.should_stop(step + number):
      return False
    evaluation = evaluate(params, run.data.evaluation_set(split))
    curves[split] = evaluation.by_length
    if jax.process_index() == 0:
      print(report.described(split, evaluation), end="\n\n", flush=True)
      report.write_evaluation(workdir, split, used, evaluation)
  examples = run.data.evaluation_set("validation")
  picture = report.draw_alignments(workdir, "validation", run, params, examples)
  if jax.process_index() == 0:
    plots.save_accuracy_by_length(
      curves,
      workdir / "figures" / "accuracy_by_length.png",
      trained_length=_trained_length(run),
    )
    print(f"alignments: {picture}\nrun: {workdir}", flush=True)
  return True


def _trained_length(run: experiment.Run) -> int | None:
  """The longest source of training, in tokens without EOS, if that is set."""
  if not isinstance(run.data, SyntheticDataset):
    return None
  return run.data.task.batch_lengths[0] - 1


def _describe(run: experiment.Run, state) -> str:
  config, devices = run.config, run.mesh.devices.size
  kind = config.model.name
  score = (
    config.model.attention
    if isinstance(config.model, Seq2SeqConfig)
    else config.model.score
  )
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  return (
    f"{config.data.name}: {kind} ({score}), {parameters:,} parameters,"
    f" {devices} {jax.devices()[0].platform} device(s)"
  )
