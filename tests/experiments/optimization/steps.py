"""Experiments that tests of the train step build, and their first steps."""

from pathlib import Path

import jax
import numpy as np

from experiments.config import parse
from experiments.distributed import mesh
from experiments.experiment import make_experiment
from tests.experiments.conftest import make_tiny

ONE = {"data": 1}
EIGHT = {"data": 8}


def build(arg="", mesh=ONE, model=None, **train):
  config = make_tiny(arg)
  config.train.update(train)
  config.model.update(model or {})
  config.mesh.update(mesh)
  # Adam divides by the gradient's magnitude. Where the exact gradient is 0, as
  # for a key's bias, its update would consist of rounding errors.
  config.optimizer.update(name="sgd", learning_rate=0.5)
  typed = parse(config.to_dict())
  return make_experiment(typed, Path("unused"))


def train(experiment, num_steps=3):
  """Losses of a few steps and the state after them."""
  state, batches, losses = (
    experiment.initial_state(),
    experiment.training_batches(),
    [],
  )
  step = experiment.train_step(state)
  for index in range(num_steps):
    state, metrics = step(
      state, mesh.shard_batch(batches[index], experiment.mesh)
    )
    losses.append(float(metrics["loss"]))
  return losses, state


def assert_same_state(left, right, **tolerance):
  for one, other in zip(
    jax.tree.leaves(left.params), jax.tree.leaves(right.params)
  ):
    np.testing.assert_allclose(one, other, **tolerance)
