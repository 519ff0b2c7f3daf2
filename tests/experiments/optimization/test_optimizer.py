"""Learning-rate schedules and optimizers."""

import jax
import jax.numpy as jnp
import optax
import pytest

from experiments.config import OptimizerConfig
from experiments.optimization.optimizer import make_optimizer, make_schedule


@pytest.mark.parametrize(
  ("schedule", "last"),
  [("constant", 1.0), ("cosine", 0.0), ("linear", 0.0), ("inverse_sqrt", 0.1)],
)
def test_schedule_rises_to_the_peak_and_ends_at_its_final_rate(schedule, last):
  config = OptimizerConfig(
    learning_rate=1.0, schedule=schedule, warmup_steps=10
  )
  rate = make_schedule(config, num_steps=1000)
  rising = [float(rate(step)) for step in range(11)]
  assert rising == sorted(rising)
  assert 0 < rising[0] < rising[9] < rising[10] == 1.0
  assert float(rate(1000)) == pytest.approx(last, abs=1e-3)


def test_linear_schedule_equals_values_computed_by_hand():
  config = OptimizerConfig(learning_rate=0.1, schedule="linear", warmup_steps=2)
  rate = make_schedule(config, num_steps=4)
  expected = [0.1 / 3, 0.2 / 3, 0.1, 0.05, 0.0]
  assert [float(rate(step)) for step in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adafactor"])
def test_every_optimizer_decreases_a_quadratic_loss(name):
  config = OptimizerConfig(
    name=name,
    learning_rate=0.1,
    schedule="constant",
    warmup_steps=0,
    weight_decay=0.1 if name == "adamw" else 0.0,
  )
  optimizer = make_optimizer(config, num_steps=50)
  params = {"w": jnp.ones((4, 4))}
  loss = lambda params: jnp.square(params["w"]).sum()  # noqa: E731

  @jax.jit
  def step(carry, _):
    params, state = carry
    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return (optax.apply_updates(params, updates), state), None

  (after, _), _ = jax.lax.scan(
    step, (params, optimizer.init(params)), length=50
  )
  assert loss(after) < 0.5 * loss(params)


@pytest.mark.parametrize("decayed", ["matrices", "all"])
def test_adamw_decays_biases_only_with_weight_decay_of_all(decayed):
  config = OptimizerConfig(
    name="adamw", weight_decay=0.5, weight_decay_of=decayed, warmup_steps=0
  )
  optimizer = make_optimizer(config, num_steps=9)
  params = {
    "kernel": jnp.ones((2, 2)),
    "bias": jnp.ones(2),
    "heads": {"bias": jnp.ones((2, 2))},
  }
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zeros, optimizer.init(params), params)
  assert (updates["kernel"] < 0).all()
  for bias in (updates["bias"], updates["heads"]["bias"]):
    assert (bias < 0).all() == (decayed == "all")


def test_gradients_are_clipped_to_the_norm():
  config = OptimizerConfig(
    name="sgd",
    learning_rate=1.0,
    schedule="constant",
    warmup_steps=0,
    b1=0.0,
    clip_norm=0.5,
  )
  optimizer = make_optimizer(config, num_steps=2)
  params = {"w": jnp.zeros(4)}
  updates, _ = optimizer.update(
    {"w": jnp.full(4, 100.0)}, optimizer.init(params), params
  )
  assert float(optax.tree.norm(updates)) == pytest.approx(0.5)
