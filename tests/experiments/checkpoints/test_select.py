"""Selecting checkpoints, and restoring their parameters alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.checkpoints import read, select
from experiments.checkpoints.manager import opened
from experiments.config import TrainConfig
from experiments.errors import UserError
from tests.experiments.checkpoints.test_checkpoints import state_at


def config(metric="bleu", **options):
  return TrainConfig(checkpoint_every=10, best_metric=metric, **options)


def save(folder, steps, *, scores=(), metric="bleu", **options):
  """Saves checkpoints at these steps; returns the steps that are kept."""
  options = {"keep_last": 3, "keep_best": 0} | options
  scores = dict(scores)
  with opened(folder, config(metric, **options)) as manager:
    for step in steps:
      score = {metric: scores[step]} if scores.get(step) is not None else None
      manager.save_state(state_at(step), {"next_index": step}, score)
    manager.wait()
    return sorted(manager.all_steps())


def choose(folder, which):
  with opened(folder, config(), read_only=True) as manager:
    return select.choose(manager, which, config())


@pytest.mark.parametrize(
  ("metric", "values", "keep_best", "kept"),
  [
    ("bleu", [3.0, 9.0, 5.0, 1.0, 2.0], 1, [20, 50]),
    ("bleu", [3.0, 9.0, 5.0, 1.0, 2.0], 2, [20, 30, 50]),
    ("loss", [3.0, 9.0, 0.5, 1.0, 2.0], 1, [30, 50]),
    ("loss", [3.0, 0.1, 0.5, 1.0, 2.0], 0, [50]),
    ("bleu", [3.0, None, 9.0, None, None], 1, [30, 50]),
    # Of equal ones, the earlier is better.
    ("bleu", [3.0, 9.0, 9.0, 9.0, 2.0], 1, [20, 50]),
    ("loss", [3.0, 0.5, 0.5, 0.5, 2.0], 2, [20, 30, 50]),
  ],
)
def test_the_last_and_the_best_checkpoints_are_kept(
  tmp_path, metric, values, keep_best, kept
):
  steps = range(10, 60, 10)
  options = {"metric": metric, "keep_last": 1, "keep_best": keep_best}
  assert save(tmp_path, steps, scores=zip(steps, values), **options) == kept


@pytest.fixture(scope="module")
def preempted(tmp_path_factory):
  """Checkpoints of a run that was stopped after steps 25 and 34."""
  folder = tmp_path_factory.mktemp("preempted")
  kept = save(folder, [10, 20, 25, 30, 34], scores={10: 5.0}, keep_best=1)
  assert kept == [10, 20, 30, 34]
  return folder


@pytest.mark.parametrize(
  ("which", "steps"),
  [
    ("last", [34]),
    ("last:1", [30]),
    ("last:2", [20, 30]),
    ("best:2", [10]),
    ("34", [34]),
  ],
)
def test_last_n_excludes_checkpoints_saved_at_preemptions(
  preempted, which, steps
):
  assert choose(preempted, which) == steps


def test_a_checkpoint_saved_at_a_preemption_replaces_no_regular_one(tmp_path):
  assert save(tmp_path, [10, 20, 30, 35], keep_last=2) == [20, 30, 35]
  assert save(tmp_path, [40], keep_last=2) == [30, 40]


def test_last_n_without_regular_checkpoints_is_the_last(tmp_path):
  save(tmp_path, [5])
  assert choose(tmp_path, "last:10") == [5]


def test_last_n_excludes_an_old_best_checkpoint(tmp_path, caplog):
  scores = {10: 9.0, 20: 1.0, 30: 2.0, 40: 3.0}
  steps = save(
    tmp_path, [10, 20, 30, 40], scores=scores, keep_last=2, keep_best=1
  )
  assert steps == [10, 30, 40]
  assert choose(tmp_path, "last:3") == [30, 40]
  assert "only 2 of the last 3 checkpoints were kept" in caplog.text
  caplog.clear()
  assert choose(tmp_path, "last:2") == [30, 40]
  assert "were kept" not in caplog.text


def parameters(folder, like):
  with opened(folder, config(), read_only=True) as manager:
    return read.parameters(manager, "last:2", like, config())


def test_parameters_are_restored_without_the_optimizer_state(preempted):
  like = state_at(1)
  expected, used = parameters(preempted, like)
  assert used == "mean of 2 steps, 20 to 30"
  # The checkpoints hold Adam's state, which has another structure.
  like = dataclasses.replace(like, opt_state=optax.sgd(1.0).init(like.params))
  found, _ = parameters(preempted, like)
  for name, leaf in expected.items():
    np.testing.assert_array_equal(found[name], leaf)


@pytest.mark.parametrize(
  ("params", "message"),
  [
    ({"w": jnp.zeros(4), "b": jnp.float32(0)}, "stored shape: \\(3,\\)"),
    ({"w": jnp.zeros(3)}, "holds other arrays .*params/b"),
    (
      {"w": jnp.zeros(3), "b": jnp.float32(0), "c": jnp.zeros(2)},
      "holds other arrays .*params/c",
    ),
  ],
)
def test_parameters_of_another_model_are_refused(params, message, preempted):
  like = dataclasses.replace(state_at(1), params=params)
  with pytest.raises(UserError, match=message):
    parameters(preempted, like)
