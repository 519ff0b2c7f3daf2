"""The plan of a training step, from the cost of its program."""

import dataclasses

import jax
import pytest

from configs import base, translation
from experiments.aot import abstract, plan
from experiments.aot.cost import Cost
from experiments.aot.targets import TARGETS, Target
from experiments.config import parse
from experiments.data.batch import BatchShape

COST = Cost(
  kernels=1000,
  copies=0,
  traffic=3 * 2**30,
  temporaries=2 * 2**30,
  arguments=2**30,
  results=0,
  collectives={"all-reduce": (2, 2**20)},
  seconds=0.004,
  compile_seconds=9.0,
)


@pytest.mark.parametrize(
  ("temporaries", "words"), [(2**30, "fits"), (16 * 2**30, "DOES NOT FIT")]
)
def test_a_step_fits_if_its_memory_is_below_the_device_s(temporaries, words):
  cost = dataclasses.replace(COST, temporaries=temporaries)
  step = plan.Step(BatchShape(8, 32, 32), 16, cost)
  text = plan.describe(step, TARGETS["v5e"])
  assert f", {words} (" in text
  assert "2 x all-reduce: 1.0 MiB" in text
  assert "compiled, not run" in text


OUT_OF_MEMORY = (
  "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the"
  " total memory required for HLO temporaries (115.01G) exceeds available HBM"
  " (15.75G). HLO module: jit_train_step.\n\nLarger program allocations: ..."
)


@pytest.fixture
def refused_plan(monkeypatch):
  """Plans two lengths with a compiler that raises an error."""
  monkeypatch.setattr(Target, "devices", lambda *_: jax.devices()[:1])

  def steps(error):
    def refuse(*arguments, **options):
      raise jax.errors.JaxRuntimeError(error)

    monkeypatch.setattr(plan, "compiled", refuse)
    config = parse(translation.get_config().to_dict())
    return [*plan.steps(config, TARGETS["v5e"], "v5e:1x1", [32, 64])]

  return steps


def test_a_step_that_a_compiler_refuses_does_not_fit(refused_plan):
  """The plan goes on with the next length."""
  target = TARGETS["v5e"]
  planned = refused_plan(OUT_OF_MEMORY)
  assert [step.shape.source for step in planned] == [32, 64]
  assert not any(step.fits(target) for step in planned)
  assert plan.describe(planned[0], target).endswith(
    "DOES NOT FIT: the total memory required for HLO temporaries (115.01G)"
    " exceeds available HBM (15.75G)"
  )


@pytest.mark.parametrize(
  "error",
  [
    "INTERNAL: a defect",
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem",
  ],
)
def test_other_errors_of_a_compiler_are_raised(error, refused_plan):
  with pytest.raises(jax.errors.JaxRuntimeError, match=error):
    refused_plan(error)


@pytest.mark.parametrize(("size", "helps"), [(62, True), (90, False)])
def test_a_gpu_s_default_fraction_is_named_if_more_would_do(size, helps):
  cost = dataclasses.replace(COST, temporaries=size * 2**30)
  step = plan.Step(BatchShape(8, 32, 32), 1, cost)
  text = plan.describe(step, TARGETS["h100"])
  assert "DOES NOT FIT" in text
  assert ("unless XLA_PYTHON_CLIENT_MEM_FRACTION" in text) == helps


def test_a_plan_says_what_its_estimate_is():
  cost = dataclasses.replace(COST, operations=3e12)
  step = plan.Step(BatchShape(8, 32, 32), 16, cost)
  on_gpu = plan.describe(step, TARGETS["h100"])
  assert "estimate 4.0 ms (compiled, not run): for each kernel" in on_gpu
  assert "(as long as 3.00 TFLOP in bfloat16)" in on_gpu
  on_tpu = plan.describe(step, TARGETS["v5e"])
  assert "estimate 4.0 ms (compiled, not run): the compiler's" in on_tpu


def test_batches_become_a_multiple_of_the_devices():
  text = parse(translation.get_config().to_dict())
  task = parse(base.get_config().to_dict())
  assert plan.with_whole_rows(text, 4) == (text, None)
  changed, flag = plan.with_whole_rows(text, 256)
  assert flag == "--config.train.row_multiple=256"
  assert abstract.batch_shape(changed, 32) == (256, 32, 32)
  changed, flag = plan.with_whole_rows(task, 12)
  assert flag == "--config.train.batch_size=36"
  assert changed.train.batch_size == 36
  step = plan.Step(BatchShape(36, 26, 26), 12, COST, flag)
  assert flag in plan.describe(step, TARGETS["v5e"])


def test_text_needs_no_data_to_be_planned():
  config = parse(translation.get_config().to_dict())
  experiment = abstract.abstract_experiment(config, jax.devices()[:1])
  shape = abstract.batch_shape(config, 32)
  assert shape == (128, 32, 32)
  _, (state, batch) = abstract.train_step(experiment, shape)
  vocabulary = config.data.target_tokenizer.vocabulary_size
  assert state.params["embedding"]["embedding"].shape[0] == vocabulary
  assert batch.source.shape == (128, 32)


def test_the_shape_of_a_task_is_that_of_its_batches():
  config = parse(base.get_config().to_dict())
  assert abstract.batch_shape(config) == (32, 26, 26)
