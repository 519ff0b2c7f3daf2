"""The plan of a training step, from the cost of its program."""

import dataclasses

import jax
import pytest

from configs import base, translation
from experiments.aot import abstract, plan
from experiments.aot.cost import Cost
from experiments.aot.targets import TARGETS
from experiments.config import parse

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
  step = plan.Step(abstract.Shape(8, 32, 32), 16, cost)
  text = plan.describe(step, TARGETS["v5e"])
  assert f", {words} (" in text
  assert "2 x all-reduce: 1.0 MiB" in text
  assert "compiled, not run" in text


OUT_OF_MEMORY = (
  "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the"
  " total memory required for HLO temporaries (115.01G) exceeds available HBM"
  " (15.75G). HLO module: jit_train_step.\n\nLarger program allocations: ..."
)


def test_a_step_that_a_compiler_refuses_does_not_fit(monkeypatch):
  """The plan goes on with the next length."""

  def refuse(*arguments, **options):
    raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)

  target = dataclasses.replace(TARGETS["v5e"])
  monkeypatch.setattr(type(target), "devices", lambda *_: jax.devices()[:1])
  monkeypatch.setattr(plan, "compiled", refuse)
  config = parse(translation.get_config().to_dict())
  planned = [*plan.steps(config, target, "v5e:1x1", [32, 64])]
  assert [step.shape.source for step in planned] == [32, 64]
  assert not any(step.fits(target) for step in planned)
  assert plan.describe(planned[0], target).endswith(
    "DOES NOT FIT: the total memory required for HLO temporaries (115.01G)"
    " exceeds available HBM (15.75G)"
  )
  monkeypatch.setattr(f"{__name__}.OUT_OF_MEMORY", "INTERNAL: a defect")
  with pytest.raises(jax.errors.JaxRuntimeError, match="a defect"):
    next(plan.steps(config, target, "v5e:1x1", [32]))


def test_a_gpu_s_default_fraction_of_memory_is_named():
  cost = dataclasses.replace(COST, temporaries=60 * 2**30)
  step = plan.Step(abstract.Shape(8, 32, 32), 1, cost)
  text = plan.describe(step, TARGETS["h100"])
  assert "DOES NOT FIT unless XLA_PYTHON_CLIENT_MEM_FRACTION" in text


def test_a_plan_says_what_its_estimate_is():
  cost = dataclasses.replace(COST, operations=3e12)
  step = plan.Step(abstract.Shape(8, 32, 32), 16, cost)
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
  step = plan.Step(abstract.Shape(36, 26, 26), 12, COST, flag)
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
