"""The train step: accumulation, averages, precision and metrics."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.config import TrainConfig
from experiments.data.batch import PAD
from experiments.distributed import mesh
from experiments.evaluation import evaluator
from experiments.optimization.step import make_train_step
from tests.experiments.optimization.steps import (
  EIGHT,
  ONE,
  assert_same_state,
  build,
  train,
)


@functools.cache
def plain():
  """An experiment without options, and the result of `train`."""
  experiment = build("additive")
  return experiment, *train(experiment)


@pytest.mark.exhaustive
@pytest.mark.parametrize("devices", [ONE, EIGHT])
def test_accumulation_gives_the_update_of_the_whole_batch(devices):
  whole, state = train(build(mesh=devices))
  parts, accumulated = train(build(mesh=devices, accumulation=2))
  np.testing.assert_allclose(whole, parts, rtol=1e-5)
  assert_same_state(state, accumulated, atol=1e-5)


@pytest.mark.exhaustive
def test_a_step_uses_the_gradient_of_the_mean_loss_per_token():
  experiment = build()
  batch = experiment.training_batches()[0]
  state = experiment.initial_state()

  def loss(params):
    logits = experiment.model.apply(
      {"params": params}, batch.source, batch.target
    )
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, batch.target[..., None], -1)[..., 0]
    real = batch.target != PAD
    return -jnp.where(real, picked, 0).sum() / real.sum()

  value, grads = jax.jit(jax.value_and_grad(loss))(state.params)
  updates, _ = experiment.optimizer.update(grads, state.opt_state, state.params)
  expected = optax.apply_updates(state.params, updates)
  after, metrics = jax.jit(
    make_train_step(experiment.model, experiment.optimizer)
  )(state, batch)
  np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
  np.testing.assert_allclose(
    metrics["gradient_norm"], optax.tree.norm(grads), rtol=1e-5
  )
  assert_same_state(
    after, dataclasses.replace(state, params=expected), atol=1e-6
  )
  assert int(after.step) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("arg", ["additive", "transformer"])
def test_bfloat16_trains_float32_parameters_and_decodes(arg):
  experiment = build(arg, dtype="bfloat16")
  losses, state = train(experiment)
  exact = plain()[1] if arg == "additive" else train(build(arg))[0]
  np.testing.assert_allclose(losses, exact, rtol=0.03)
  assert losses != exact
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(state.params)}
  assert dtypes == {jnp.dtype("float32")}
  evaluate = evaluator.make_evaluator(experiment)
  examples = experiment.data.evaluation_set("validation")
  result = evaluate(state.params, examples)
  assert len(result.predictions) == len(examples.batch.target)
  assert 0 < result.metrics["loss"] < 10


@pytest.mark.exhaustive
def test_the_moving_average_equals_that_of_a_numpy_loop():
  decay = 0.27  # more than is kept at first, less than later
  experiment = build(ema_decay=decay)
  config = TrainConfig(ema_decay=decay)
  step = jax.jit(
    make_train_step(experiment.model, experiment.optimizer, config)
  )
  state, batches = experiment.initial_state(), experiment.training_batches()
  expected = jax.tree.map(np.float64, state.params)
  for index in range(6):
    state, _ = step(state, batches[index])
    kept = min(decay, (1 + index) / (10 + index))
    expected = jax.tree.map(
      lambda old, new, kept=kept: kept * old + (1 - kept) * np.float64(new),
      expected,
      state.params,
    )
  assert state.evaluated is state.average
  for found, known, last in zip(
    *map(jax.tree.leaves, (state.average, expected, state.params))
  ):
    np.testing.assert_allclose(found, known, rtol=1e-5, atol=1e-7)
    assert (found != last).any()


@pytest.mark.exhaustive
def test_without_a_decay_there_is_no_average():
  _, _, state = plain()
  assert state.average is None
  assert state.evaluated is state.params
  _, averaged = train(build(ema_decay=0.9))
  # Compiled without optimisations, the two programs round differently.
  assert_same_state(state, averaged, rtol=1e-5)


@pytest.mark.exhaustive
def test_label_smoothing_interpolates_with_the_loss_of_a_uniform_target():
  experiment, losses, _ = plain()
  smooth, _ = train(build(label_smoothing=0.3), num_steps=1)
  batch = experiment.training_batches()[0]
  params = experiment.initial_state().params
  logits = experiment.model.apply(
    {"params": params}, batch.source, batch.target
  )
  spread = -jax.nn.log_softmax(logits).mean(-1)
  real = batch.target != PAD
  uniform = float(jnp.where(real, spread, 0).sum() / real.sum())
  assert smooth[0] == pytest.approx(0.7 * losses[0] + 0.3 * uniform, rel=1e-5)


@pytest.mark.exhaustive
def test_a_skipped_update_changes_only_the_step():
  experiment = build()
  config = TrainConfig(non_finite="skip")

  @jax.jit
  def update(learning_rate, state, batch):
    optimizer = optax.sgd(learning_rate, momentum=0.9)
    state = dataclasses.replace(state, opt_state=optimizer.init(state.params))
    step = make_train_step(experiment.model, optimizer, config)
    return state, *step(state, batch)

  state, batch = experiment.initial_state(), experiment.training_batches()[0]
  for learning_rate, moves in ((0.1, True), (np.inf, False)):
    before, after, metrics = update(learning_rate, state, batch)
    assert np.isfinite(metrics["parameter_norm"]) == moves
    assert after.step == 1
    same = [
      np.array_equal(one, other)
      for one, other in zip(
        jax.tree.leaves((before.params, before.opt_state)),
        jax.tree.leaves((after.params, after.opt_state)),
      )
    ]
    assert all(same) != moves


@pytest.mark.exhaustive
def test_the_step_traces_once():
  experiment = build()
  traces = []

  def counted(state, batch):
    traces.append(1)
    return make_train_step(experiment.model, experiment.optimizer)(state, batch)

  step, state = jax.jit(counted), experiment.initial_state()
  for index in range(3):
    batch = experiment.training_batches()[index]
    state, _ = step(state, mesh.shard_batch(batch, experiment.mesh))
  assert len(traces) == 1
