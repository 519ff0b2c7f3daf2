"""Runs train, evaluate and draw attention weights of every normalizer."""

import itertools
import json

import numpy as np
import pytest

from attention.modules import NORMALIZER_NAMES
from configs import numbers, reverse
from experiments.training import loop
from tests.experiments.conftest import make_model_small, make_tiny, read_little

CONFIGS = {"reverse": reverse, "numbers": numbers}


@pytest.mark.parametrize(
  ("normalizer", "data", "arg"),
  list(
    itertools.product(NORMALIZER_NAMES, CONFIGS, ["additive", "transformer"])
  ),
)
def test_a_run_with_each_normalizer(normalizer, data, arg, tmp_path):
  config = CONFIGS[data].get_config(arg)
  if data == "reverse":
    config.data = make_tiny().data
  else:
    config.data.num_shapes = 1
  config.data.splits = {"validation": config.data.splits["validation"]}
  read_little(config, tmp_path)
  make_model_small(config)
  config.model.normalizer = normalizer
  config.train.update(
    steps=2, log_every=1, eval_every=2, checkpoint_every=2, batch_size=128
  )
  config.mesh.data = 1
  assert loop.train_and_evaluate(config, tmp_path)
  result = json.loads((tmp_path / "eval" / "validation.json").read_text())
  assert np.isfinite(result["metrics"]["loss"])
  assert 0 < result["metrics"]["alignment_error_rate"] <= 1
  figure = tmp_path / "figures" / "alignments_validation"
  assert figure.with_suffix(".png").stat().st_size > 5000
  weights = np.load(figure.with_suffix(".npz"), allow_pickle=False)["weights"]
  assert weights.any()
  assert (weights < 0).any() == (normalizer == "signed_softmax")
