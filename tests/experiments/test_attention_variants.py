"""Runs with every normalizer and every score that depends on positions."""

import json
import typing

import numpy as np
import pytest

from attention.modules import NORMALIZER_NAMES, SCORE_NAMES, SCORE_WRAPPER_NAMES
from configs import numbers, reverse
from experiments.config.sections import AttentionName, TransformerScoreName
from experiments.training import loop
from tests.experiments.conftest import make_model_small, make_tiny, read_little
from tests.matrix import sampled, sampled_product

CONFIGS = {"reverse": reverse, "numbers": numbers}


@sampled_product(
  ("normalizer", "data", "arg"),
  (NORMALIZER_NAMES, CONFIGS, ["additive", "transformer"]),
  default=[("entmax", "reverse", "transformer")],
)
def test_a_run_with_each_normalizer(normalizer, data, arg, tmp_path):
  weights = run(data, arg, tmp_path, normalizer=normalizer)
  assert (weights < 0).any() == (normalizer == "signed_softmax")


@sampled("data", CONFIGS, default=["reverse"])
@sampled(
  ("arg", "score"),
  [
    (arg, name)
    for arg, names in (
      ("rnn", AttentionName),
      ("transformer", TransformerScoreName),
    )
    for name in typing.get_args(names)
    if name not in (*SCORE_NAMES, "none")
  ],
  default=[],
)
def test_a_run_with_each_positional_score(arg, score, data, tmp_path):
  if arg == "rnn":
    run(data, score, tmp_path)
  else:
    run(data, arg, tmp_path, score=score)


@pytest.mark.exhaustive
@pytest.mark.parametrize("data", CONFIGS)
@pytest.mark.parametrize(
  "variant",
  [
    *({"score_wrapper": name} for name in SCORE_WRAPPER_NAMES),
    {"forget_gate": True},
  ],
  ids=[*SCORE_WRAPPER_NAMES, "forget_gate"],
)
def test_a_run_with_each_change_of_the_scores(variant, data, tmp_path):
  run(data, "transformer", tmp_path, **variant)


@pytest.mark.exhaustive
def test_a_run_with_dot_products_in_a_window(tmp_path):
  run("reverse", "local_p", tmp_path, local_score="dot")


def run(data, arg, workdir, **model):
  """Trains two steps; returns the attention weights of the validation set."""
  config = CONFIGS[data].get_config(arg)
  if data == "reverse":
    config.data = make_tiny().data
  else:
    config.data.num_shapes = 1
  config.data.splits = {"validation": config.data.splits["validation"]}
  read_little(config, workdir)
  make_model_small(config)
  config.model.update(model)
  config.train.update(
    steps=2, log_every=1, eval_every=2, checkpoint_every=2, batch_size=128
  )
  config.mesh.data = 1
  assert loop.train_and_evaluate(config, workdir)
  result = json.loads((workdir / "eval" / "validation.json").read_text())
  assert np.isfinite(result["metrics"]["loss"])
  assert 0 < result["metrics"]["alignment_error_rate"] <= 1
  figure = workdir / "figures" / "alignments_validation"
  assert figure.with_suffix(".png").stat().st_size > 5000
  weights = np.load(figure.with_suffix(".npz"), allow_pickle=False)["weights"]
  assert weights.any()
  return weights
