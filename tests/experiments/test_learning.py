"""Small runs that must learn: the models can do what the tasks ask."""

import jax
import pytest

from experiments import evaluation, runs, schema, steps
from tests.experiments.conftest import make_tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
  ("task", "arg"),
  [("copy", "transformer"), ("reverse", "additive"), ("lookup", "general")],
)
def test_a_small_run_learns_its_task(task, arg):
  config = make_tiny(arg)
  config.data.update(name=task, symbols=8, max_length=3)
  config.data.splits = {
    "validation": {"min_length": 1, "max_length": 3, "num_examples": 128}
  }
  if arg == "transformer":
    config.model.update(model_size=32, feed_forward_size=32)
  else:
    config.model.update(
      hidden_size=32, embedding_size=16, attention_size=16, order="bahdanau"
    )
  config.train.update(steps=800, batch_size=32)
  config.optimizer.update(learning_rate=5e-3, warmup_steps=20)
  run = runs.build(schema.parse(config.to_dict()), devices=1)
  step = jax.jit(steps.make_train_step(run.model, run.optimizer))
  state = runs.start(run)
  for index in range(config.train.steps):
    state, _ = step(state, run.task.training_batch(0, index, 32))
  evaluate = evaluation.make_evaluator(run.model, run.mesh)
  result = evaluate(state.params, runs.evaluation_set(run, "validation"))
  assert result.metrics["sequence_accuracy"] > 0.9, result.metrics
