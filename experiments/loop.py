"""Training from the first step to the last table: the order of things."""

import functools
import time
from contextlib import closing
from pathlib import Path

import jax
from absl import logging
from ml_collections import ConfigDict

from experiments import (
  checkpoints,
  interrupts,
  plots,
  report,
  runs,
  schema,
  sharding,
  steps,
)
from experiments import workdir as workdir_lib
from experiments.data import pipeline
from experiments.evaluation import make_evaluator
from experiments.progress import Progress
from experiments.watch import Watch
from experiments.writer import Writer


def train_and_evaluate(config: ConfigDict, workdir: str | Path) -> bool:
  """Trains a run to its end, from wherever it stands, and evaluates it.

  Args:
    config: from a file in `configs/`.
    workdir: the run's directory; see `workdir.py` for what is in it.

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
  typed = schema.parse(raw)
  run = runs.build(typed)
  sharding.check_batch(
    run.mesh, typed.train.batch_size, typed.train.accumulation
  )
  if jax.process_index() == 0:
    workdir_lib.claim(workdir, raw)
  manager = checkpoints.open_manager(
    workdir,
    keep_last=typed.train.keep_last,
    keep_best=typed.train.keep_best,
    best_metric=typed.train.best_metric,
  )
  evaluate = make_evaluator(run.model, run.mesh)
  with closing(manager):
    state, batches = _start_or_resume(run, manager)
    logging.info("%s, in %s", _describe(run, state), workdir)
    state = _train(run, workdir, manager, evaluate, state, batches)
    manager.wait_until_finished()
    if int(state.step) < typed.train.steps:
      logging.info(
        "stopped after step %d; the same command goes on", int(state.step)
      )
      return False
    _finish(run, workdir, evaluate, state)
  return True


def _start_or_resume(run: runs.Run, manager):
  """Returns the state to go on from and the batches still to come."""
  config = run.config
  batches = pipeline.training_batches(
    run.task,
    seed=config.seed,
    batch_size=config.train.batch_size,
    num_steps=config.train.steps,
  )
  restored = checkpoints.restore_last(manager, runs.abstract_state(run))
  if restored is None:
    return runs.start(run), batches
  state, position = restored
  batches.set_state(dict(position))
  logging.info("resuming after step %d", int(state.step))
  return state, batches


def _train(run: runs.Run, workdir: Path, manager, evaluate, state, batches):
  """Trains until the last step, or until asked to stop."""
  config, layout = run.config.train, sharding.batched(run.mesh)
  validation = runs.evaluation_set(run, "validation")
  train_step = jax.jit(
    steps.make_train_step(
      run.model,
      run.optimizer,
      label_smoothing=config.label_smoothing,
      accumulation=config.accumulation,
    ),
    donate_argnums=0,
    out_shardings=sharding.replicated(run.mesh),
  )

  explain = functools.partial(_explain, run, manager)
  first, begin = int(state.step), time.perf_counter()
  with (
    Writer(workdir, first, active=jax.process_index() == 0) as writer,
    Progress(config.steps, first) as progress,
    interrupts.listen() as should_stop,
  ):
    watch = Watch(writer, progress, log_every=config.log_every, explain=explain)
    for step in range(first + 1, config.steps + 1):
      batch = sharding.place(next(batches), layout)
      state, metrics = train_step(state, batch)
      watch.push(step, metrics)
      last, stop, scores = step == config.steps, should_stop(step), None
      if step == first + 1:
        watch.drain()
        seconds = time.perf_counter() - begin
        writer.timings(step, "train", {"first_step_seconds": seconds})
      if last or step % config.eval_every == 0:
        watch.drain()
        evaluation = evaluate(state.params, validation)
        scores = dict(evaluation.metrics)
        speed = {"sentences_per_second": scores.pop("sentences_per_second")}
        writer.metrics(step, "validation", scores)
        writer.timings(step, "validation", speed)
        progress.write(f"step {step}: {report.summary(evaluation)}")
      if scores or stop or step % config.checkpoint_every == 0:
        watch.drain()
        checkpoints.save(manager, state, batches.get_state(), scores)
        writer.timings(step, "train", progress.timings())
      if stop:
        break
  return state


def _explain(run: runs.Run, manager, step: int) -> str:
  """Says of a bad step where its batch stood and what to go back to."""
  last = manager.latest_step()
  good = "none yet" if last is None else str(manager.directory / str(last))
  return (
    f"its batch is number {step - 1} of seed {run.config.seed}. Last good"
    f" checkpoint: {good}. Lower config.optimizer.learning_rate or set"
    " config.optimizer.clip_norm, in another --workdir."
  )


def _finish(run: runs.Run, workdir: Path, evaluate, state) -> None:
  """Evaluates every set, and leaves numbers, tables and pictures."""
  curves = {}
  examples = runs.evaluation_set(run, "validation")
  for split in run.config.data.splits:
    examples = runs.evaluation_set(run, split)
    evaluation = evaluate(state.params, examples)
    curves[split] = evaluation.by_length
    if jax.process_index() == 0:
      print(
        report.write_evaluation(workdir, split, int(state.step), evaluation),
        end="\n\n",
        flush=True,
      )
  picture = report.draw_alignments(workdir, run, state, examples)
  if jax.process_index() == 0:
    plots.save_accuracy_by_length(
      curves,
      workdir / "figures" / "accuracy_by_length.png",
      trained_length=_trained_length(run),
    )
    print(f"alignments: {picture}\nrun: {workdir}", flush=True)


def _trained_length(run: runs.Run) -> int:
  """The longest source of training, in tokens without EOS."""
  return run.task.batch_lengths[0] - 1


def _describe(run: runs.Run, state) -> str:
  config, devices = run.config, run.mesh.devices.size
  kind = config.model.name
  score = (
    config.model.attention
    if isinstance(config.model, schema.Seq2SeqConfig)
    else config.model.score
  )
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
  return (
    f"{config.data.name}: {kind} ({score}), {parameters:,} parameters,"
    f" {devices} {jax.devices()[0].platform} device(s)"
  )
