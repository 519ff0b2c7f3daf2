"""The train step: accumulation, sharding, dropout and what it reports."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments import evaluation, runs, schema, sharding, steps
from experiments.data.batch import PAD
from experiments.errors import UserError
from tests.experiments.conftest import make_tiny


def build(arg="", devices=1, **train):
  config = make_tiny(arg)
  config.train.update(train)
  # Adam divides by the gradient's size, so that where the true gradient is 0,
  # as of a key's bias, rounding alone would decide the update.
  config.optimizer.update(name="sgd", learning_rate=0.5)
  return runs.build(schema.parse(config.to_dict()), devices=devices)


def train(run, num_steps=3, **options):
  """Losses of a few steps and the state after them."""
  step = jax.jit(
    steps.make_train_step(run.model, run.optimizer, **options),
    out_shardings=sharding.replicated(run.mesh),
  )
  state, losses = runs.start(run), []
  for index in range(num_steps):
    batch = run.task.training_batch(0, index, run.config.train.batch_size)
    placed = sharding.place(batch, sharding.batched(run.mesh))
    state, metrics = step(state, placed)
    losses.append(float(metrics["loss"]))
  return losses, state


def assert_same_state(left, right, **tolerance):
  for one, other in zip(
    jax.tree.leaves(left.params), jax.tree.leaves(right.params)
  ):
    np.testing.assert_allclose(one, other, **tolerance)


@pytest.mark.parametrize("arg", ["additive", "transformer"])
def test_eight_devices_train_as_one_does(arg):
  one, state_of_one = train(build(arg, devices=1))
  eight, state_of_eight = train(build(arg, devices=8))
  np.testing.assert_allclose(one, eight, rtol=1e-5)
  assert_same_state(state_of_one, state_of_eight, atol=1e-5)


def test_a_batch_is_split_over_the_devices_and_parameters_are_not():
  run = build(devices=8)
  batch = sharding.place(
    run.task.training_batch(0, 0, 16), sharding.batched(run.mesh)
  )
  assert {shard.data.shape[0] for shard in batch.source.addressable_shards} == {
    2
  }
  leaf = jax.tree.leaves(runs.start(run).params)[0]
  assert {shard.data.shape for shard in leaf.addressable_shards} == {leaf.shape}


@pytest.mark.parametrize("devices", [1, 8])
def test_accumulation_updates_as_the_whole_batch_does(devices):
  run = build(devices=devices)
  whole, state = train(run)
  parts, accumulated = train(run, accumulation=2)
  np.testing.assert_allclose(whole, parts, rtol=1e-5)
  assert_same_state(state, accumulated, atol=1e-5)


def test_a_step_follows_the_gradient_of_the_mean_loss_of_tokens():
  run = build()
  batch = run.task.training_batch(0, 0, 16)
  state = runs.start(run)

  def loss(params):
    logits = run.model.apply({"params": params}, batch.source, batch.target)
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, batch.target[..., None], -1)[..., 0]
    real = batch.target != PAD
    return -jnp.where(real, picked, 0).sum() / real.sum()

  value, grads = jax.jit(jax.value_and_grad(loss))(state.params)
  updates, _ = run.optimizer.update(grads, state.opt_state, state.params)
  expected = optax.apply_updates(state.params, updates)
  after, metrics = jax.jit(steps.make_train_step(run.model, run.optimizer))(
    state, batch
  )
  np.testing.assert_allclose(metrics["loss"], value, rtol=1e-6)
  np.testing.assert_allclose(
    metrics["gradient_norm"], optax.tree.norm(grads), rtol=1e-5
  )
  assert_same_state(
    after, dataclasses.replace(state, params=expected), atol=1e-6
  )
  assert int(after.step) == 1


def test_randomness_depends_on_the_step_and_the_seed_alone():
  run = build()
  model = run.model.clone(dropout_rate=0.5)
  step = jax.jit(steps.make_train_step(model, run.optimizer))
  batch = run.task.training_batch(0, 0, 16)
  state = runs.start(run)
  loss = float(step(state, batch)[1]["loss"])
  assert loss == float(step(state, batch)[1]["loss"])
  later = dataclasses.replace(state, step=jnp.int32(1))
  assert loss != float(step(later, batch)[1]["loss"])


@pytest.mark.parametrize("arg", ["additive", "transformer"])
def test_bfloat16_trains_float32_parameters_and_decodes(arg):
  run = build(arg, dtype="bfloat16")
  losses, state = train(run)
  exact, _ = train(build(arg))
  np.testing.assert_allclose(losses, exact, rtol=0.03)
  assert losses != exact
  dtypes = {leaf.dtype for leaf in jax.tree.leaves(state.params)}
  assert dtypes == {jnp.dtype("float32")}
  evaluate = evaluation.make_evaluator(run.model, run.mesh)
  examples = runs.evaluation_set(run, "validation")
  result = evaluate(state.params, examples)
  assert result.predicted.shape == examples.target.shape
  assert 0 < result.metrics["loss"] < 10


def test_label_smoothing_is_part_of_the_loss_in_training_only():
  run = build()
  plain, _ = train(run, num_steps=1)
  smooth, _ = train(run, num_steps=1, label_smoothing=0.3)
  batch = run.task.training_batch(0, 0, 16)
  params = runs.start(run).params
  logits = run.model.apply({"params": params}, batch.source, batch.target)
  spread = -jax.nn.log_softmax(logits).mean(-1)
  real = batch.target != PAD
  uniform = float(jnp.where(real, spread, 0).sum() / real.sum())
  assert smooth[0] == pytest.approx(0.7 * plain[0] + 0.3 * uniform, rel=1e-5)


def test_the_step_traces_once():
  run = build()
  traces = []

  def counted(state, batch):
    traces.append(1)
    return steps.make_train_step(run.model, run.optimizer)(state, batch)

  step, state = jax.jit(counted), runs.start(run)
  for index in range(3):
    batch = run.task.training_batch(0, index, 16)
    state, _ = step(state, sharding.place(batch, sharding.batched(run.mesh)))
  assert len(traces) == 1


def test_more_devices_than_there_are():
  with pytest.raises(UserError, match=r"config\.mesh\.data: 64 devices"):
    build(devices=64)


def test_a_batch_that_does_not_divide():
  run = build(devices=8)
  with pytest.raises(UserError, match="does not divide over 8 devices"):
    sharding.check_batch(run.mesh, 20, 1)
  with pytest.raises(UserError, match="multiple of 32"):
    sharding.check_batch(run.mesh, 16, 4)
