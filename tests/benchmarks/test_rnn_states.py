"""The scale of RNN states agrees with the attention weights."""

import jax
import numpy as np
import pytest

from benchmarks import rnn_states
from experiments.config import parse
from experiments.data.batch import BOS, PAD
from experiments.evaluation.alignment_error import target_attention_weights
from experiments.experiment import make_experiment
from tests.experiments.conftest import make_tiny


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["bahdanau", "luong"])
@pytest.mark.parametrize("score", ["dot", "scaled_dot"])
def test_gap_equals_difference_of_log_weights(score, order):
  config = make_tiny(score)
  config.model.order = order
  experiment = make_experiment(parse(config.to_dict()), None)
  params = jax.tree.map(
    lambda each: 3 * each, experiment.initial_state().params
  )
  sizes = rnn_states.measure(experiment, params)

  batch = experiment.data.evaluation_set("validation").batch
  weights = jax.device_get(
    target_attention_weights(
      experiment.model, params, batch.source, batch.target
    )
  )
  gaps = []
  for source, target, rows in zip(batch.source, batch.target, weights[:, 0, 0]):
    inputs = [BOS, *target[:-1]]
    steps = [t for t, token in enumerate(inputs) if token != PAD]
    logs = np.log(rows[steps][:, np.asarray(source) != PAD])
    gaps.extend(logs.max(axis=-1) - logs.mean(axis=-1))
  scale = 8**0.5 if score == "scaled_dot" else 1.0
  np.testing.assert_allclose(sizes.gap, scale * np.mean(gaps), rtol=1e-4)
  assert sizes.gap > 0.1
  assert 0 < sizes.encoder < 1
  assert 0 < sizes.query < 1
  assert sizes.num_features == 8


@pytest.mark.exhaustive
def test_zero_parameters_give_equal_states():
  experiment = make_experiment(parse(make_tiny("dot").to_dict()), None)
  zeros = jax.tree.map(np.zeros_like, experiment.initial_state().params)
  assert rnn_states.measure(experiment, zeros) == (0, 0, 0, 8)
