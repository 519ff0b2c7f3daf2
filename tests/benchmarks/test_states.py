import jax
import numpy as np
import pytest

from benchmarks import states
from experiments import decoding
from experiments.config import parse
from experiments.data.batch import BOS, PAD
from experiments.experiment import make_experiment
from tests.experiments.conftest import make_tiny


@pytest.mark.parametrize("order", ["bahdanau", "luong"])
@pytest.mark.parametrize("score", ["dot", "scaled_dot"])
def test_the_gap_is_that_between_the_logarithms_of_the_weights(score, order):
  config = make_tiny(score)
  config.model.order = order
  experiment = make_experiment(parse(config.to_dict()), None)
  params = jax.tree.map(
    lambda each: 3 * each, experiment.initial_state().params
  )
  sizes = states.measure(experiment, params)

  batch = experiment.data.evaluation_set("validation").batch
  weights = jax.device_get(
    decoding.alignments(experiment.model, params, batch.source, batch.target)
  )
  gaps = []
  for source, target, rows in zip(batch.source, batch.target, weights[:, 0]):
    before = [BOS, *target[:-1]]
    asked = [t for t, token in enumerate(before) if token != PAD]
    logs = np.log(rows[asked][:, np.asarray(source) != PAD])
    gaps.extend(logs.max(axis=-1) - logs.mean(axis=-1))
  scale = 8**0.5 if score == "scaled_dot" else 1.0
  np.testing.assert_allclose(sizes.gap, scale * np.mean(gaps), rtol=1e-4)
  assert sizes.gap > 0.1
  assert 0 < sizes.encoder < 1
  assert 0 < sizes.query < 1
  assert sizes.num_features == 8


def test_states_of_nothing_are_all_alike():
  experiment = make_experiment(parse(make_tiny("dot").to_dict()), None)
  nothing = jax.tree.map(np.zeros_like, experiment.initial_state().params)
  assert states.measure(experiment, nothing) == (0, 0, 0, 8)
