"""Pruning heads: metrics of a model without each of them."""

import json

import jax
import numpy as np
import pytest

from experiments import inference
from experiments.config import parse
from experiments.errors import UserError
from experiments.evaluation.evaluator import make_evaluator
from experiments.experiment import make_experiment
from experiments.inference import head_pruning
from experiments.training import loop
from tests.experiments import processes
from tests.experiments.conftest import make_tiny


def made(arg="transformer"):
  experiment = make_experiment(parse(make_tiny(arg).to_dict()), None)
  return (
    experiment,
    experiment.initial_state().params,
    experiment.data.evaluation_set("validation"),
  )


@pytest.mark.exhaustive
def test_pruning_a_pruned_head_changes_no_metric():
  experiment, params, examples = made()
  place = ("decoder_0", "cross_attention")
  params = head_pruning.pruned(params, place, 1)
  results = head_pruning.prune_heads(experiment, params, examples)
  metrics = make_evaluator(experiment)(params, examples).metrics
  assert list(results) == ["loss", experiment.config.train.best_metric]
  for metric, result in results.items():
    heads = result.without["cross-attention"][0]
    assert heads[1] == result.whole == metrics[metric]
  assert results["loss"].without["cross-attention"][0, 0] != metrics["loss"]


@pytest.mark.exhaustive
def test_the_outputs_of_single_heads_sum_to_the_output_of_all():
  experiment, params, _ = made()
  layer = experiment.model.bind({"params": params}).encoder[0]
  x = jax.random.normal(
    jax.random.key(0), (2, 3, experiment.config.model.model_size)
  )
  attention = layer.self_attention
  whole = attention(x)
  parts = []
  for head in range(experiment.config.model.num_heads):
    only = params
    for other in range(experiment.config.model.num_heads):
      if other != head:
        only = head_pruning.pruned(only, ("encoder_0", "self_attention"), other)
    bound = experiment.model.bind({"params": only}).encoder[0]
    bias = only["encoder_0"]["self_attention"]["output_projection"]["bias"]
    parts.append(bound.self_attention(x) - bias[None, None])
  np.testing.assert_allclose(sum(parts) + bias[None, None], whole, atol=1e-5)


def test_heads_without_effect_have_the_color_of_zero(tmp_path, monkeypatch):
  heads = np.full((1, 2), 0.5)
  results = {
    metric: head_pruning.Pruning(0.5, {"cross": heads, "self": heads + change})
    for metric, change in (("loss", 0.25), ("bleu", 0.0))
  }
  figures = []
  monkeypatch.setattr(
    head_pruning.plots, "save_figure", lambda figure, _: figures.append(figure)
  )
  head_pruning.save_figure(results, tmp_path / "heads.png", "title")
  images = [image for axis in figures[0].axes for image in axis.images]
  assert [image.get_clim() for image in images] == [(0, 0.25)] * 2 + [
    (0, 1)
  ] * 2


@pytest.mark.exhaustive
def test_pruning_requires_a_transformer():
  experiment, params, examples = made("dot")
  with pytest.raises(UserError, match="only a Transformer has heads"):
    head_pruning.prune_heads(experiment, params, examples)


@pytest.mark.exhaustive
def test_the_binary_reports_the_heads_of_a_run(tmp_path):
  config = make_tiny("transformer")
  config.mesh.data = 1
  loop.train_and_evaluate(config, tmp_path)
  out, _ = processes.succeeded(
    "analyze_heads", f"--workdir={tmp_path}", "--split=longer"
  )
  assert "longer: sequence_accuracy 0." in out
  assert "cross-attention" in out
  found = json.loads((tmp_path / "eval" / "longer_heads.json").read_text())
  restored = inference.restore(tmp_path)
  _, examples = inference.evaluation_set(restored.experiment, "longer")
  results = head_pruning.prune_heads(
    restored.experiment, restored.params, examples
  )
  for metric, result in results.items():
    assert found[metric]["whole"] == pytest.approx(result.whole, rel=1e-5)
    for kind, values in result.without.items():
      given = found[metric]["without"][kind]
      np.testing.assert_allclose(given, values, rtol=1e-5)
  assert (tmp_path / "figures" / "heads_longer.png").stat().st_size > 5000
