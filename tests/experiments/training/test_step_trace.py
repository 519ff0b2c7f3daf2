"""The trace of training steps."""

import jax.numpy as jnp

from experiments.training.step_trace import FOLDER, StepTrace


def test_the_steps_after_the_first_are_traced_once(tmp_path):
  trace = StepTrace(tmp_path, 2, warm_up=1)
  written = []
  for number in range(5):
    with trace.step(number):
      result = jnp.ones(3) + number
    trace.after(result)
    written.append(any((tmp_path / FOLDER).rglob("*.xplane.pb")))
  trace.close()
  assert written == [False, False, True, True, True]
  assert len(list((tmp_path / FOLDER).rglob("*.xplane.pb"))) == 1


def test_a_run_that_stops_early_writes_its_trace(tmp_path):
  trace = StepTrace(tmp_path, 100, warm_up=0)
  with trace.step(1):
    jnp.ones(3).block_until_ready()
  trace.close()
  assert any((tmp_path / FOLDER).rglob("*.xplane.pb"))


def test_without_steps_there_is_no_trace(tmp_path):
  trace = StepTrace(tmp_path, 0)
  for number in range(30):
    with trace.step(number):
      pass
  trace.close()
  assert not (tmp_path / FOLDER).exists()
