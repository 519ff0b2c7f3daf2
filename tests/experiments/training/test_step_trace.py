"""The trace of training steps."""

import jax.numpy as jnp
import pytest

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


def test_a_run_that_stops_early_writes_its_trace(tmp_path, caplog):
  trace = StepTrace(tmp_path, 100, warm_up=0)
  with trace.step(1):
    jnp.ones(3).block_until_ready()
  with caplog.at_level("INFO", "absl"):
    trace.close()
  assert "wrote a trace of 1 of 100 training steps to" in caplog.text
  assert any((tmp_path / FOLDER).rglob("*.xplane.pb"))


@pytest.mark.parametrize("count", [0, 5])
def test_without_steps_there_is_no_trace(count, tmp_path, caplog):
  trace = StepTrace(tmp_path, count, warm_up=30)
  for number in range(30):
    with trace.step(number):
      pass
  trace.close()
  assert not (tmp_path / FOLDER).exists()
  assert ("no step was traced: the first 30" in caplog.text) == (count > 0)
