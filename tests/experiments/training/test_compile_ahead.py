"""Steps that are compiled in threads equal those compiled when needed."""

from pathlib import Path

import jax
import numpy as np
import pytest

from configs import base
from experiments.config import MeshConfig, parse
from experiments.data.batch import Batch
from experiments.distributed import mesh
from experiments.experiment import make_experiment
from experiments.training import compile_ahead


def make(shapes):
  config = base.get_config("none")
  config.model.update(embedding_size=4, hidden_size=4)
  experiment = make_experiment(
    parse(config.to_dict()), Path("unused"), mesh=MeshConfig.one()
  )
  batches = [
    Batch(*(np.full((shape[0], length), 3, np.int32) for length in shape[1:]))
    for shape in shapes
  ]
  return experiment, [mesh.shard_batch(b, experiment.mesh) for b in batches]


@pytest.mark.exhaustive
def test_steps_compiled_ahead_equal_steps_compiled_when_needed():
  shapes = [(2, 3, 4), (4, 2, 2)]
  experiment, batches = make(shapes)
  results = []
  for ahead in (True, False):
    state = experiment.initial_state()
    step = experiment.train_step(state)
    if ahead:
      step = compile_ahead.compile_ahead(experiment, state, shapes)
    for batch in (*batches, *batches):
      state, _ = step(state, batch)
    results.append(state.params)
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_cpus_compile_when_needed(monkeypatch):
  monkeypatch.setattr(compile_ahead, "compile_ahead", None)
  experiment, _ = make([])
  state = experiment.abstract_state()
  assert compile_ahead.make_train_step(experiment, state, [(2, 3, 4)] * 2)


def test_the_batch_shapes_of_a_task_are_those_of_its_batches():
  experiment, _ = make([])
  batches = experiment.training_batches()
  source, target = batches[0]
  assert batches.batch_shapes() == [(*source.shape, target.shape[1])]
