"""Steps that are compiled in threads equal those compiled when needed."""

import dataclasses
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


class Known(list):
  """Batches of known shapes."""

  def batch_shapes(self):
    return [(2, 3, 4), (2, 5, 5)]


def make(shapes):
  config = base.get_config("none")
  config.model.update(embedding_size=4, hidden_size=4)
  experiment = make_experiment(
    parse(config.to_dict()), Path("unused"), mesh=MeshConfig.one()
  )
  batches = [mesh.shard_batch(batch(each), experiment.mesh) for each in shapes]
  return experiment, batches


def batch(shape):
  rows, *lengths = shape
  return Batch(*(np.full((rows, length), 3, np.int32) for length in lengths))


@pytest.mark.exhaustive
def test_steps_compiled_ahead_equal_steps_compiled_when_needed():
  shapes = [(2, 3, 4), (4, 2, 2), (2, 2, 2)]
  experiment, batches = make(shapes)
  results = []
  for ahead in (shapes[:2], [], None):
    state = experiment.initial_state()
    step = experiment.train_step(state)
    if ahead is not None:
      step = compile_ahead.compile_ahead(experiment, ahead)
    for batch in (*batches, *batches):
      state, _ = step(state, batch)
    results.append(state.params)
  for each in results[1:]:
    jax.tree.map(np.testing.assert_array_equal, results[0], each)


@pytest.mark.parametrize(
  ("platform", "first", "want"),
  [
    ("cpu", 1, [(2, 5, 5)]),
    ("tpu", 1, [(2, 5, 5), (2, 3, 4)]),
    ("cpu", 9, []),  # a run that is complete
  ],
)
def test_the_first_shape_is_compiled_first_and_on_cpus_alone(
  platform, first, want, monkeypatch
):
  found = []
  monkeypatch.setattr(
    compile_ahead, "compile_ahead", lambda _, shapes: found.extend(shapes)
  )
  experiment, _ = make([])
  batches = [batch(shape) for shape in Known().batch_shapes()]
  train = experiment.config.train.model_copy(update={"steps": 9})
  config = experiment.config.model_copy(update={"train": train})
  experiment = dataclasses.replace(experiment, config=config)
  monkeypatch.setattr(compile_ahead.mesh, "platform", lambda _: platform)
  compile_ahead.compile_train_step(experiment, Known(batches), first)
  assert found == want


def test_the_batch_shapes_of_a_task_are_those_of_its_batches():
  experiment, _ = make([])
  batches = experiment.training_batches()
  source, target = batches[0]
  assert batches.batch_shapes() == [(*source.shape, target.shape[1])]
