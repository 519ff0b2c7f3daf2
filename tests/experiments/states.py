"""Runs that tests train in their own process, and readers of their files."""

import json

import jax
import numpy as np

from configs import base
from experiments import inference
from experiments.checkpoints import read
from experiments.checkpoints.manager import opened
from experiments.distributed import preemption
from tests.experiments.conftest import make_tiny


def tiny_run(arg="", **train):
  """A config of one evaluation set, for one device."""
  config = make_tiny(arg)
  config.data.splits = {"validation": base.split(1, 4, 16)}
  config.train.update(train)
  config.mesh.data = 1
  config.evaluation.beam_size = 2  # evaluations during training are greedy
  return config


def stop_at(monkeypatch, *steps):
  """Makes training stop after each of these steps once."""
  pending = list(steps)

  def should_stop(self, step):
    del self
    if step in pending:
      pending.remove(step)
      return True
    return False

  monkeypatch.setattr(preemption.StopSignals, "should_stop", should_stop)


def final_state(workdir):
  """The state of the last checkpoint."""
  experiment = inference.restore(workdir, "last").experiment
  train = experiment.config.train
  with opened(workdir, train, read_only=True) as manager:
    like = experiment.abstract_state
    state, _ = read.restore(manager, manager.latest_step(), like)
  return state


def assert_same_bits(one, other):
  assert int(one.step) == int(other.step)
  for left, right in zip(
    jax.tree.leaves((one.params, one.opt_state, one.average)),
    jax.tree.leaves((other.params, other.opt_state, other.average)),
    strict=True,
  ):
    np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def metrics(workdir, split=None):
  """The lines of metrics.jsonl, of one split or of all."""
  text = (workdir / "metrics.jsonl").read_text()
  records = map(json.loads, text.splitlines())
  return [each for each in records if split in (None, each["split"])]


def results(workdir):
  """The files of eval/, without timings."""
  contents = {}
  for path in (workdir / "eval").glob("*.json"):
    contents[path.name] = json.loads(path.read_text())
    contents[path.name]["metrics"].pop("sentences_per_second", None)
  for path in (workdir / "eval").glob("*.txt"):
    contents[path.name] = path.read_text("utf-8")
  return contents
