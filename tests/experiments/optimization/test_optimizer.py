"""Schedules, optimisers and tables: small functions, known answers."""

import jax
import jax.numpy as jnp
import optax
import pytest

from configs import base
from experiments.config import OptimizerConfig
from experiments.evaluation import evaluator
from experiments.optimization.optimizer import make_optimizer, make_schedule


def optimizer_config(**changes):
  return OptimizerConfig(**{**base.optimizer(), **changes})


@pytest.mark.parametrize(
  ("schedule", "last"),
  [("constant", 1.0), ("cosine", 0.0), ("linear", 0.0), ("inverse_sqrt", 0.1)],
)
def test_schedules_rise_to_the_peak_and_fall(schedule, last):
  config = optimizer_config(
    learning_rate=1.0, schedule=schedule, warmup_steps=10
  )
  rate = make_schedule(config, num_steps=1000)
  rising = [float(rate(step)) for step in range(11)]
  assert rising == sorted(rising)
  assert 0 < rising[0] < rising[9] < rising[10] == 1.0
  assert float(rate(1000)) == pytest.approx(last, abs=1e-3)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "adafactor"])
def test_every_optimizer_goes_downhill(name):
  config = optimizer_config(
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
def test_adamw_decays_biases_only_if_asked_to(decayed):
  config = optimizer_config(
    name="adamw", weight_decay=0.5, weight_decay_of=decayed, warmup_steps=0
  )
  optimizer = make_optimizer(config, num_steps=9)
  params = {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}
  zeros = jax.tree.map(jnp.zeros_like, params)
  updates, _ = optimizer.update(zeros, optimizer.init(params), params)
  assert (updates["kernel"] < 0).all()
  assert (updates["bias"] < 0).all() == (decayed == "all")


def test_gradients_are_clipped_to_the_norm():
  config = optimizer_config(
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


def test_the_table_pools_lengths_by_their_tokens():
  rows = [
    {"length": n, "to_length": n, "count": 2, "tokens": 2 * n,
     "token_accuracy": 1.0 * (n > 1), "sequence_accuracy": 0.5}
    for n in range(1, 21)
  ]  # fmt: skip
  lines = evaluator.table(rows, num_bins=10).splitlines()
  assert len(lines) == 11
  assert lines[1].split() == ["1-2", "4", "66.67%", "50.00%"]
  assert lines[-1].split()[0] == "19-20"


def test_the_table_of_text_has_the_ranges_that_were_judged():
  rows = [
    {"length": first, "to_length": last, "count": 2, "tokens": 9,
     "token_accuracy": 0.5, "sequence_accuracy": 0.25, "bleu": 12.345,
     "chrf": 50.0}
    for first, last in ((1, 4), (5, 8), (9, 9))
  ]  # fmt: skip
  lines = evaluator.table(rows, num_bins=1).splitlines()
  assert lines[0].split()[-2:] == ["BLEU", "chrF"]
  assert lines[1].split() == [
    "1-4", "2", "50.00%", "25.00%", "12.35", "50.00",
  ]  # fmt: skip
  assert [line.split()[0] for line in lines[1:]] == ["1-4", "5-8", "9"]
