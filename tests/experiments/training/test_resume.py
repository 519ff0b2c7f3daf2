"""A run that is stopped and resumed ends with the bits of one that is not.

By default `run_directory/test_remote.py` tests it, for a run in a bucket.
"""

import pytest

from experiments.training import loop
from tests.attention.comparison import close
from tests.experiments.states import (
  assert_same_bits,
  final_state,
  metrics,
  results,
  stop_at,
  tiny_run,
)


def assert_resumes_exactly(config, folder, monkeypatch, steps):
  stop_at(monkeypatch)
  assert loop.train_and_evaluate(config, folder / "whole")
  stop_at(monkeypatch, *steps)
  for _ in steps:
    assert not loop.train_and_evaluate(config, folder / "stopped")
  assert loop.train_and_evaluate(config, folder / "stopped")
  assert_same_bits(
    final_state(folder / "whole"), final_state(folder / "stopped")
  )
  assert metrics(folder / "whole") == metrics(folder / "stopped")
  assert results(folder / "whole") == results(folder / "stopped")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("non_finite_losses")
@pytest.mark.parametrize(
  ("arg", "steps"),
  [("none", [11]), ("additive", [11]), ("additive", [5, 11])],
)
def test_resume_is_bit_exact_with_averages_and_skipped_updates(
  arg, steps, tmp_path, monkeypatch
):
  """Stops after steps at which an undisturbed run saves no checkpoint.

  Their checkpoints count neither among the last N nor among those that are
  kept, and the number of skipped updates does not restart at 0.
  """
  config = tiny_run(
    arg, non_finite="skip", log_every=1, keep_last=3, ema_decay=0.9
  )
  config.evaluation.checkpoint = "last:3"
  config.evaluation.beam_size = 1  # the program of evaluations in training
  config.model.dropout_rate = 0.1
  config.model.bidirectional = arg != "none"  # "none": compiles less
  assert_resumes_exactly(config, tmp_path, monkeypatch, steps)
  (used,) = {
    result["checkpoint"]
    for name, result in results(tmp_path / "stopped").items()
    if name.endswith(".json")
  }
  assert used == "mean of 3 steps, 6 to 12"
  assert metrics(tmp_path / "stopped")[-2]["skipped"] > 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("score", ["scaled_dot", "local_p", "forgetting"])
def test_resume_is_bit_exact_for_a_transformer(score, tmp_path, monkeypatch):
  config = tiny_run("transformer")
  config.model.score = score
  config.model.dropout_rate = 0.1
  assert_resumes_exactly(config, tmp_path, monkeypatch, steps=[7])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
@pytest.mark.parametrize("arg", ["none", "dot"])
def test_resume_is_bit_exact_for_every_optimizer(
  arg, name, tmp_path, monkeypatch
):
  config = tiny_run(arg, accumulation=2, label_smoothing=0.1)
  config.optimizer.update(name=name, b2=0.98, eps=1e-9)
  assert_resumes_exactly(config, tmp_path, monkeypatch, steps=[1, 8])


@pytest.mark.exhaustive
def test_a_run_resumes_with_layers_in_a_loop(tmp_path, monkeypatch):
  config = tiny_run("transformer")
  config.model.update(encoder_layers=2, decoder_layers=2)
  # Adam would enlarge rounding errors where the exact gradient is 0.
  config.optimizer.update(name="sgd", learning_rate=0.1)
  stop_at(monkeypatch)
  assert loop.train_and_evaluate(config, tmp_path / "unrolled")
  stop_at(monkeypatch, 7)
  assert not loop.train_and_evaluate(config, tmp_path / "changed")
  config.model.update(scan_layers=True, remat=True)
  assert loop.train_and_evaluate(config, tmp_path / "changed")
  unrolled, changed = (
    final_state(tmp_path / name).params for name in ("unrolled", "changed")
  )
  close(unrolled, changed, rtol=1e-7, atol=1e-4)
