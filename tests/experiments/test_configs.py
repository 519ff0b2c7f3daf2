"""Every config builds: shapes of parameters, a step and predictions."""

import importlib
import pathlib

import jax
import pytest

from configs import base
from experiments import decoding
from experiments.config import MeshConfig, parse
from experiments.data.dataset import BatchShard
from experiments.errors import UserError
from experiments.experiment import make_experiment
from experiments.optimization.step import init_state, make_train_step
from tests.experiments.conftest import read_little
from tests.matrix import sampled_product

NAMES = sorted(
  path.stem
  for path in pathlib.Path(base.__file__).parent.glob("*.py")
  if path.stem not in ("__init__", "base")
)
# These train on a user's own text, so they have no result.
WITHOUT_RESULT = ("translation",)


@sampled_product(
  ("name", "arg"), (NAMES, ["", *base.ARGUMENTS]), default=[("reverse", "none")]
)
def test_builds(name, arg, corpus, tmp_path):
  config = importlib.import_module(f"configs.{name}").get_config(arg)
  typed = parse(read_little(config, corpus).to_dict())
  experiment = make_experiment(
    typed, tmp_path, mesh=MeshConfig.one(), train=True
  )
  few = typed.train.model_copy(
    update={"batch_size": 2, "batch_unit": "examples"}
  )
  batches = experiment.data.training_batches(few, seed=0, shard=BatchShard())
  batch = batches[0]
  state = jax.eval_shape(
    lambda: init_state(experiment.model, experiment.optimizer, seed=0)
  )
  step = make_train_step(experiment.model, experiment.optimizer)
  after, metrics = jax.eval_shape(step, state, batch)
  assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(
    lambda leaf: leaf.shape, state
  )
  assert metrics["loss"].shape == ()
  examples = experiment.data.evaluation_set("validation")
  predictions = jax.eval_shape(
    lambda params: decoding.greedy(
      experiment.model, params, examples.batch.source[:2], max_length=5
    ),
    state.params,
  )
  assert predictions.shape == (2, 5)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_argument_lists_the_known_ones(name):
  module = importlib.import_module(f"configs.{name}")
  with pytest.raises(UserError, match=r"known: none, dot, .*transformer"):
    module.get_config("dott")


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_has_source_command_time_and_result(name):
  text = importlib.import_module(f"configs.{name}").__doc__
  needed = [f"--config=configs/{name}.py"]
  if name not in WITHOUT_RESULT:
    needed += ["Source:", "Time:", "Result:"]
  missing = [each for each in needed if each not in text]
  assert missing == [], f"{name}: its docstring lacks {missing}"
