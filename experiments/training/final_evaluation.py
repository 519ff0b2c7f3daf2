"""Evaluates the parameters of a finished training on every set."""

from pathlib import Path
from typing import Any

import jax

from experiments.data.dataset import EvaluationSet
from experiments.data.synthetic.dataset import SyntheticDataset
from experiments.distributed import mesh
from experiments.distributed.preemption import StopSignals
from experiments.evaluation import Evaluation, make_evaluator, report
from experiments.evaluation.evaluator import (
  add_alignment_error,
  described_search,
)
from experiments.evaluation.metrics import CorpusMetrics
from experiments.evaluation.search import configured_search
from experiments.experiment import Experiment
from experiments.optimization.step import TrainState
from experiments.visualization import plots
from experiments.visualization.alignments import draw_alignments


def evaluate_all(
  experiment: Experiment,
  workdir: Path,
  manager,
  signals: StopSignals,
  state: TrainState,
  validation: Evaluation | None,  # greedy, of `state`; it is not repeated
  *,
  is_new: bool,  # whether this call has trained `state`
) -> bool:
  """Evaluates every set and writes results; returns False on a signal."""
  config, step = experiment.config, int(state.step)
  params, checkpoint = _parameters(experiment, manager, state)
  search = configured_search(experiment)
  evaluate = make_evaluator(experiment, search)
  greedy = configured_search(experiment, beam_size=1)
  if checkpoint != f"step {step}" or search != greedy:
    validation = None
  curves = {}
  # Several processes might not all see the same files.
  keeps_results = not is_new and jax.process_count() == 1
  for number, split in enumerate(config.data.splits, start=1):
    if signals.should_stop(step + number):
      return False
    examples = experiment.data.evaluation_set(split)
    known = validation if split == "validation" else None
    written = None
    if keeps_results:
      settings = _settings(experiment, checkpoint, examples)
      written = report.read_evaluation(workdir, split, examples, settings)
    evaluation = written or add_alignment_error(
      known or evaluate(params, examples), experiment, params, examples
    )
    curves[split] = evaluation.by_length
    if jax.process_index() == 0:
      described = report.described(split, checkpoint, evaluation)
      print(described, end="\n\n", flush=True)
      report.write_evaluation(
        workdir, split, checkpoint, evaluation, config=config.evaluation
      )
  _draw(experiment, workdir, params, curves)
  return True


def _parameters(
  experiment: Experiment, manager, state: TrainState
) -> tuple[Any, str]:
  """The parameters to evaluate, and a description of their checkpoint."""
  from experiments.checkpoints.read import parameters

  params, checkpoint = parameters(
    manager,
    experiment.config.evaluation.checkpoint,
    experiment.abstract_state,
    experiment.config.train,
    state=state,
  )
  return mesh.all_gather(params, experiment.mesh), checkpoint


def _settings(
  experiment: Experiment, checkpoint: str, examples: EvaluationSet
) -> dict[str, Any]:
  """What the file of an evaluation with this config has."""
  corpus = CorpusMetrics(
    experiment.config.evaluation, text=examples.text is not None
  )
  return {
    "checkpoint": checkpoint,
    "search": described_search(configured_search(experiment)),
    "signatures": corpus.signatures,
  }


def _draw(experiment: Experiment, workdir: Path, params, curves) -> None:
  """Draws accuracy by length, and attention weights on the validation set."""
  data, longest = experiment.data, None
  if isinstance(data, SyntheticDataset):
    longest = data.trained_length
  examples = data.evaluation_set("validation")
  figure = draw_alignments(workdir, "validation", experiment, params, examples)
  if jax.process_index() == 0:
    path = workdir / "figures" / "accuracy_by_length.png"
    plots.save_accuracy_by_length(
      curves, path, trained_length=longest, title=experiment.config.title
    )
    print(f"alignments: {figure}\nrun: {workdir}", flush=True)
