"""The training loop: kept checkpoints, non-finite losses, early stopping."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import experiment as experiment_module
from experiments import inference
from experiments.config import parse
from experiments.errors import UserError
from experiments.evaluation.evaluator import Evaluation, make_evaluator
from experiments.evaluation.search import configured_search
from experiments.optimization.step import make_train_step
from experiments.run_directory import claim
from experiments.training import loop
from tests.experiments.conftest import make_tiny, make_tiny_translation
from tests.experiments.states import final_state, metrics, stop_at, tiny_run
from tests.matrix import sampled

GREEDY = {"beam_size": 1, "length_penalty": 1.0}


@sampled(
  "metric",
  ["gradient_norm", "loss", "parameter_norm"],
  default=["gradient_norm"],
)
def test_the_error_of_a_non_finite_step_names_batch_and_checkpoint(
  metric, tmp_path, monkeypatch
):
  make = make_train_step

  def make_non_finite(*args, **options):
    step = make(*args, **options)

    def non_finite_step(state, batch):
      bad = state.step == 7
      state, values = step(state, batch)
      values[metric] = jnp.where(bad, jnp.nan, values[metric])
      return state, values

    return non_finite_step

  monkeypatch.setattr(experiment_module, "make_train_step", make_non_finite)
  message = (
    rf"step 8: {metric} is nan; its batch is number 7 of seed 0\. Last good"
    r" checkpoint: .*checkpoints/6\."
  )
  config = make_tiny("none")
  config.model.bidirectional = False
  config.mesh.data = 1
  with pytest.raises(UserError, match=message):
    loop.train_and_evaluate(config, tmp_path / "run")


@pytest.mark.parametrize(
  ("clip_norm", "advice"),
  [
    (None, "Lower config.optimizer.learning_rate or set config.optimizer.clip"),
    (1.0, "Lower config.optimizer.learning_rate, in another --workdir."),
  ],
)
def test_the_error_of_a_non_finite_step_advises_what_is_not_set(
  clip_norm, advice
):
  config = make_tiny()
  config.optimizer.clip_norm = clip_norm
  manager = SimpleNamespace(folder=Path("run"), latest_step=lambda: None)
  experiment = SimpleNamespace(config=parse(config.to_dict()))
  assert advice in loop._explain(experiment, lambda: manager, 3)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("non_finite_losses")
def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
  config = tiny_run(checkpoint_every=1)
  with pytest.raises(UserError, match="loss is nan; its batch is number"):
    loop.train_and_evaluate(config, tmp_path / "run")
  state = final_state(tmp_path / "run")
  assert 0 < int(state.step) < 12
  for leaf in jax.tree.leaves((state.params, state.opt_state)):
    assert jnp.isfinite(leaf).all()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("non_finite_losses")
def test_non_finite_updates_are_skipped_and_counted(tmp_path):
  config = tiny_run(non_finite="skip", log_every=1)
  assert loop.train_and_evaluate(config, tmp_path / "run")
  lines = metrics(tmp_path / "run", "train")
  skipped = [line for line in lines if "loss" not in line]
  assert 0 < len(skipped) < len(lines) == 12
  assert lines[-1]["skipped"] == len(skipped)
  restored = inference.restore(tmp_path / "run")
  for leaf in jax.tree.leaves(restored.params):
    assert jnp.isfinite(leaf).all()


def assert_same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.exhaustive
def test_an_average_is_kept_resumed_and_evaluated(tmp_path):
  config, workdir = tiny_run(ema_decay=0.9), tmp_path / "run"
  config.optimizer.update(learning_rate=0.03, warmup_steps=0)
  assert loop.train_and_evaluate(config, workdir)
  state, restored = final_state(workdir), inference.restore(workdir)
  experiment = restored.experiment
  assert_same(restored.params, state.average)
  evaluate = make_evaluator(experiment)
  examples = experiment.data.evaluation_set("validation")
  averaged, plain = (
    evaluate(params, examples).metrics["loss"]
    for params in (state.average, state.params)
  )
  result = json.loads((workdir / "eval" / "validation.json").read_text())
  for loss in (
    result["metrics"]["loss"],
    metrics(workdir, "validation")[-1]["loss"],
  ):
    assert loss == pytest.approx(averaged, rel=1e-5)
    assert loss != pytest.approx(plain, rel=1e-3)
  shutil.rmtree(workdir / "checkpoints" / "12")
  assert loop.train_and_evaluate(config, workdir)
  again = final_state(workdir)
  assert int(again.step) == 12
  assert_same((again.average, again.params), (state.average, state.params))


def script_evaluations(monkeypatch, metric, values):
  """Makes evaluations during training return these values in turn."""
  scripted = iter(values)

  def make_scripted(*_):
    names = ("token_accuracy", "sequence_accuracy", "bleu", "loss")
    scores = dict.fromkeys((*names, "sentences_per_second"), 1.0)
    return lambda *_: Evaluation(
      {**scores, metric: next(scripted)}, [], {}, [], GREEDY, 0, 1, {}
    )

  monkeypatch.setattr(loop, "make_evaluator", make_scripted)


@pytest.mark.exhaustive
def test_early_stopping_ends_a_run_that_does_not_improve(tmp_path, monkeypatch):
  config = tiny_run(eval_every=2, patience=2, best_metric="bleu")
  # The fourth evaluation improves; an equal one is no improvement.
  script_evaluations(monkeypatch, "bleu", [1.0, 3.0, 2.0, 4.0, 3.0, 4.0])
  config.train.steps = 16
  workdir = tmp_path / "run"
  assert loop.train_and_evaluate(config, workdir)
  state = final_state(workdir)
  assert int(state.step) == 12
  steps = [line["step"] for line in metrics(workdir, "validation")]
  assert steps == [2, 4, 6, 8, 10, 12]
  # A second call trains nothing, but evaluates the set without results.
  result = workdir / "eval" / "validation.json"
  written = (workdir / "metrics.jsonl").read_text()
  assert json.loads(result.read_text())["checkpoint"] == "step 12"
  result.unlink()
  assert loop.train_and_evaluate(config, workdir)
  assert result.exists()
  assert (workdir / "metrics.jsonl").read_text() == written
  assert_same(final_state(workdir).params, state.params)


@pytest.mark.exhaustive
def test_early_stopping_counts_evaluations_before_resuming(
  tmp_path, monkeypatch
):
  config = tiny_run(eval_every=2, patience=2, best_metric="loss")
  script_evaluations(monkeypatch, "loss", [3.0, 2.0, 2.5, 2.1])
  stop_at(monkeypatch, 7)
  assert not loop.train_and_evaluate(config, tmp_path / "run")
  assert loop.train_and_evaluate(config, tmp_path / "run")
  assert int(final_state(tmp_path / "run").step) == 8


@pytest.mark.exhaustive
def test_a_run_on_text_is_evaluated_with_the_mean_of_checkpoints(
  corpus, tmp_path
):
  config, workdir = make_tiny_translation(corpus), tmp_path / "run"
  config.mesh.data = 1
  assert loop.train_and_evaluate(config, workdir)
  result = json.loads((workdir / "eval" / "test.json").read_text())
  assert result["checkpoint"] == "mean of 2 steps, 6 to 8"
  assert result["signatures"].keys() == {"bleu", "chrf"}
  predictions = (workdir / "eval" / "test.txt").read_text(encoding="utf-8")
  references = (corpus / "test.de").read_text(encoding="utf-8")
  assert len(predictions.splitlines()) == len(references.splitlines())
  restored = inference.restore(workdir)
  search = configured_search(restored.experiment)
  assert search.beam_size == 2
  examples = restored.experiment.data.evaluation_set("test")
  again = inference.evaluate(restored, examples, search)
  assert again.predictions == predictions.splitlines()
  del result["metrics"]["sentences_per_second"]
  for name, value in result["metrics"].items():
    assert again.metrics[name] == pytest.approx(value)


@pytest.mark.parametrize(
  ("section", "field", "value", "message"),
  [
    ("data", "train", "trian", "config.data.train: no file"),
    ("data", "max_length", 2, "none is left"),
    ("train", "batch_size", 15, "do not divide over 2 devices"),
  ],
)
def test_a_config_error_before_training_leaves_the_directory_unclaimed(
  section, field, value, message, corpus, tmp_path
):
  config, workdir = make_tiny_translation(corpus), tmp_path / "run"
  config.train.update(batch_unit="examples", batch_size=16)
  config.mesh.data = 2
  config[section][field] = value
  raw = config.to_dict()
  with pytest.raises(UserError, match=message):
    loop.train_and_evaluate(config, workdir)
  assert claim(workdir, raw)
  # An error does not release the directory of an existing run.
  with pytest.raises(UserError, match=message):
    loop.train_and_evaluate(config, workdir)
  assert not claim(workdir, raw)


def test_an_implementation_that_is_refused_leaves_the_directory_unclaimed(
  tmp_path,
):
  config, workdir = make_tiny("transformer"), tmp_path / "run"
  config.model.attention_implementation = "pallas"
  with pytest.raises(UserError, match="needs a TPU or a Hopper GPU"):
    loop.train_and_evaluate(config, workdir)
  assert not workdir.exists()
