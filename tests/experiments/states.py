"""The states that runs leave, compared bit for bit."""

import jax
import numpy as np

from experiments import checkpoints, inference


def final_state(workdir):
  run = inference.restore(workdir).experiment
  with checkpoints.opened(workdir, read_only=True) as manager:
    like = run.abstract_state()
    state, _ = checkpoints.restore(manager, manager.latest_step(), like)
  return state


def assert_same_bits(one, other):
  assert int(one.step) == int(other.step)
  for left, right in zip(
    jax.tree.leaves((one.params, one.opt_state)),
    jax.tree.leaves((other.params, other.opt_state)),
  ):
    np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
