"""What a head is worth: how a model does without."""

import json

import jax
import numpy as np
import pytest

from experiments import experiment
from experiments.config import parse
from experiments.errors import UserError
from experiments.evaluation.evaluator import make_evaluator
from experiments.inference import head_pruning, restored
from experiments.training import loop
from tests.experiments import processes
from tests.experiments.conftest import make_tiny


def made(arg="transformer"):
  run = experiment.build(parse(make_tiny(arg).to_dict()), None)
  return (
    run,
    experiment.start(run).params,
    run.data.evaluation_set("validation"),
  )


def test_a_head_that_adds_nothing_costs_nothing():
  run, params, examples = made()
  place = ("decoder_0", "cross_attention")
  params = head_pruning.pruned(params, place, 1)
  worths = head_pruning.worth_of_heads(run, params, examples)
  metrics = make_evaluator(run)(params, examples).metrics
  assert list(worths) == ["loss", run.config.train.best_metric]
  for metric, worth in worths.items():
    heads = worth.without["cross-attention"][0]
    assert heads[1] == worth.whole == metrics[metric]
  assert worths["loss"].without["cross-attention"][0, 0] != metrics["loss"]


def test_a_pruned_head_adds_nothing():
  run, params, _ = made()
  layer = run.model.bind({"params": params}).encoder[0]
  x = jax.random.normal(jax.random.key(0), (2, 3, run.config.model.model_size))
  attention = layer.self_attention
  whole = attention(x)
  parts = []
  for head in range(run.config.model.num_heads):
    only = params
    for other in range(run.config.model.num_heads):
      if other != head:
        only = head_pruning.pruned(only, ("encoder_0", "self_attention"), other)
    bound = run.model.bind({"params": only}).encoder[0]
    bias = only["encoder_0"]["self_attention"]["output_projection"]["bias"]
    parts.append(bound.self_attention(x) - bias[None, None])
  np.testing.assert_allclose(sum(parts) + bias[None, None], whole, atol=1e-5)


def test_only_a_transformer_has_heads():
  run, params, examples = made("dot")
  with pytest.raises(UserError, match="only a Transformer has heads"):
    head_pruning.worth_of_heads(run, params, examples)


def test_heads_are_told_of_a_run(tmp_path):
  config = make_tiny("transformer")
  config.mesh.data = 1
  loop.train_and_evaluate(config, tmp_path)
  code, out, error = processes.run(
    "heads", f"--workdir={tmp_path}", "--split=longer"
  )
  assert code == 0, error
  assert "longer: sequence_accuracy 0." in out
  assert "cross-attention" in out
  found = json.loads((tmp_path / "eval" / "longer_heads.json").read_text())
  finished = restored.restore(tmp_path)
  _, examples = restored.examples(finished.run, "longer")
  worths = head_pruning.worth_of_heads(finished.run, finished.params, examples)
  for metric, worth in worths.items():
    assert found[metric]["whole"] == pytest.approx(worth.whole, rel=1e-5)
    for kind, values in worth.without.items():
      given = found[metric]["without"][kind]
      np.testing.assert_allclose(given, values, rtol=1e-5)
  assert (tmp_path / "figures" / "heads_longer.png").stat().st_size > 5000
