"""The states that runs leave, compared bit for bit."""

import jax
import numpy as np

from experiments import checkpoints, experiment
from experiments.inference import restored


def final_state(workdir):
  run = restored.restore(workdir).run
  with checkpoints.opened(workdir, read_only=True) as manager:
    like = experiment.abstract_state(run)
    state, _ = checkpoints.restore(manager, manager.latest_step(), like)
  return state


def assert_same_bits(one, other):
  assert int(one.step) == int(other.step)
  for left, right in zip(
    jax.tree.leaves((one.params, one.opt_state)),
    jax.tree.leaves((other.params, other.opt_state)),
  ):
    np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
