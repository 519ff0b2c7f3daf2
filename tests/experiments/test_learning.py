"""Small models learn their tasks."""

import jax
import pytest

from experiments.config import MeshConfig, parse
from experiments.evaluation import evaluator
from experiments.experiment import make_experiment
from experiments.optimization.step import make_train_step
from tests.experiments.conftest import make_tiny

CASES = {
  "copy": ("transformer", {"model_size": 32, "feed_forward_size": 32}, 32),
  "reverse": ("additive", {"hidden_size": 32, "embedding_size": 16}, 32),
  "lookup": ("general", {"hidden_size": 128, "embedding_size": 64}, 64),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", CASES)
def test_small_run_learns_its_task(task, tmp_path):
  arg, sizes, batch_size = CASES[task]
  config = make_tiny(arg)
  config.data.update(name=task, symbols=16, max_length=3)
  config.data.splits = {
    "validation": {"min_length": 1, "max_length": 3, "num_examples": 128}
  }
  config.model.update(sizes)
  config.train.update(steps=600, batch_size=batch_size)
  config.optimizer.update(learning_rate=3e-3, warmup_steps=20)
  experiment = make_experiment(
    parse(config.to_dict()), tmp_path, mesh=MeshConfig.one()
  )
  step = jax.jit(make_train_step(experiment.model, experiment.optimizer))
  state, batches = experiment.initial_state(), experiment.training_batches()
  for index in range(config.train.steps):
    state, _ = step(state, batches[index])
  evaluate = evaluator.make_evaluator(experiment)
  result = evaluate(state.params, experiment.data.evaluation_set("validation"))
  assert result.metrics["sequence_accuracy"] > 0.9, result.metrics
