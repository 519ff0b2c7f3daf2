"""The loop in this process: what is kept, and what stops it."""

import jax.numpy as jnp
import pytest

from experiments import checkpoints, loop, runs, schema, steps
from experiments.errors import UserError
from tests.experiments.conftest import make_tiny


def save_all(tmp_path, metric, values, keep_best):
  """Saves a checkpoint a value; returns the steps that remain."""
  run = runs.build(schema.parse(make_tiny().to_dict()), devices=1)
  state = runs.start(run)
  manager = checkpoints.open_manager(
    tmp_path, keep_last=1, keep_best=keep_best, best_metric=metric
  )
  for step, value in enumerate(values, start=1):
    state = state.replace(step=jnp.int32(step))
    scores = None if value is None else {metric: value}
    checkpoints.save(manager, state, {"next_index": step}, scores)
  manager.wait_until_finished()
  kept = sorted(manager.all_steps())
  manager.close()
  return kept


@pytest.mark.parametrize(
  ("metric", "values", "keep_best", "kept"),
  [
    ("bleu", [3.0, 9.0, 5.0, 1.0, 2.0], 1, [2, 5]),
    ("bleu", [3.0, 9.0, 5.0, 1.0, 2.0], 2, [2, 3, 5]),
    ("loss", [3.0, 9.0, 0.5, 1.0, 2.0], 1, [3, 5]),
    ("loss", [3.0, 0.1, 0.5, 1.0, 2.0], 0, [5]),
    ("bleu", [3.0, None, 9.0, None, None], 1, [3, 5]),
  ],
)
def test_the_last_and_the_best_checkpoints_are_kept(
  tmp_path, metric, values, keep_best, kept
):
  assert save_all(tmp_path, metric, values, keep_best) == kept


@pytest.mark.parametrize("spoilt", ["loss", "gradient_norm", "parameter_norm"])
def test_a_non_finite_step_is_named_with_batch_and_checkpoint(
  spoilt, tmp_path, monkeypatch
):
  make = steps.make_train_step

  def make_spoilt(*args, **options):
    step = make(*args, **options)

    def spoilt_step(state, batch):
      bad = state.step == 7
      state, metrics = step(state, batch)
      metrics[spoilt] = jnp.where(bad, jnp.nan, metrics[spoilt])
      return state, metrics

    return spoilt_step

  monkeypatch.setattr(steps, "make_train_step", make_spoilt)
  message = (
    rf"step 8: {spoilt} is nan; its batch is number 7 of seed 0\. Last good"
    r" checkpoint: .*checkpoints/6\."
  )
  config = make_tiny()
  config.mesh.data = 1
  with pytest.raises(UserError, match=message):
    loop.train_and_evaluate(config, tmp_path / "run")
