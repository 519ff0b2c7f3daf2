"""Every config builds: shapes of parameters, a step and an answer."""

import importlib
import pathlib

import jax
import pytest

from configs import base
from experiments import decode, runs, schema, steps

NAMES = sorted(
  path.stem
  for path in pathlib.Path(base.__file__).parent.glob("*.py")
  if path.stem not in ("__init__", "base")
)


@pytest.mark.parametrize("arg", ["", *base.ARGUMENTS])
@pytest.mark.parametrize("name", NAMES)
def test_builds(name, arg):
  config = importlib.import_module(f"configs.{name}").get_config(arg)
  run = runs.build(schema.parse(config.to_dict()), devices=1)
  batch = run.task.training_batch(0, 0, size=2)
  state = jax.eval_shape(
    lambda: steps.init_state(run.model, run.optimizer, batch, seed=0)
  )
  step = steps.make_train_step(run.model, run.optimizer)
  after, metrics = jax.eval_shape(step, state, batch)
  assert jax.tree.map(lambda leaf: leaf.shape, after) == jax.tree.map(
    lambda leaf: leaf.shape, state
  )
  assert metrics["loss"].shape == ()
  examples = runs.evaluation_set(run, "validation")
  answer = jax.eval_shape(
    lambda params: decode.greedy(
      run.model, params, examples.source[:2], max_length=5
    ),
    state.params,
  )
  assert answer.shape == (2, 5)


@pytest.mark.parametrize("name", NAMES)
def test_unknown_argument_lists_the_known_ones(name):
  module = importlib.import_module(f"configs.{name}")
  with pytest.raises(ValueError, match=r"known: none, dot, .*transformer"):
    module.get_config("dott")


@pytest.mark.parametrize("name", NAMES)
def test_docstring_tells_source_command_time_and_result(name):
  text = importlib.import_module(f"configs.{name}").__doc__
  for needed in ("Source:", f"--config=configs/{name}.py", "Time:", "Result:"):
    assert needed in text, f"{name}: its docstring does not tell {needed!r}"
