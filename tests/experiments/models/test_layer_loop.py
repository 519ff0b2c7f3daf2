"""Loops over layers and rematerialisation: the same results, fewer bytes."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from experiments.config import TransformerConfig
from experiments.data.batch import Batch
from experiments.models.layers.dropout import Dropout
from experiments.models.transformer.layer_loop import apply_layers
from experiments.optimization.step import (
  init_state,
  make_loss_step,
  make_train_step,
)
from tests.attention.comparison import close, equations
from tests.experiments.models.test_models import SOURCE, TARGET
from tests.experiments.toys import make_transformer, random_parameters
from tests.matrix import sampled

ENCODER, DECODER = 2, 2  # layers
SETTINGS = {
  "scan": {"scan_layers": True},
  "remat": {"remat": True},
  "scan-remat": {"scan_layers": True, "remat": True},
}
VARIANTS = {
  "rotary": {"positions": "rotary"},
  "post": {"norm": "post", "score": "additive", "normalizer": "softmax_sink"},
  "forget": {"forget_gate": True, "score": "shaw", "positions": "none"},
  "local_p": {"score": "local_p", "positions": "none", "window": 2},
}


def make_model(**options):
  layers = {"encoder_layers": ENCODER, "decoder_layers": DECODER}
  return make_transformer(11, 11, **layers | options)


@functools.cache
def parameters(variant):
  return random_parameters(make_model(**VARIANTS[variant]), SOURCE, TARGET)


@functools.cache
def results(variant, setting=None, rate=0.0, stored=("intermediates",)):
  """A loss, what is stored, and gradients through both."""
  settings = SETTINGS[setting] if setting else {}
  model = make_model(dropout_rate=rate, **VARIANTS[variant], **settings)

  def loss(params):
    made, variables = model.apply(
      {"params": params},
      SOURCE,
      TARGET,
      train=True,
      rngs={"dropout": jax.random.key(1)},
      method="features",
      mutable=stored,
    )
    features, _ = made
    weights = variables.get("intermediates", {})
    total = optax.tree.sum(jax.tree.map(jnp.sin, (features, weights)))
    return total, weights

  compute = jax.jit(jax.value_and_grad(loss, has_aux=True))
  return compute(parameters(variant))


assert_close = functools.partial(close, rtol=1e-7, atol=2e-5)


@sampled("variant", VARIANTS, default=["rotary"])
@sampled("setting", SETTINGS, default=["scan-remat"])
def test_loss_gradients_and_weights_are_those_of_unrolled_layers(
  setting, variant
):
  assert_close(results(variant, setting), results(variant))


@sampled("setting", SETTINGS, default=["scan-remat"])
def test_parameters_are_initialized_by_the_same_program(setting):
  programs = [
    str(jax.make_jaxpr(model.init)(jax.random.key(0), SOURCE, TARGET))
    for model in (make_model(), make_model(**SETTINGS[setting]))
  ]
  assert programs[0] == programs[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", SETTINGS)
def test_dropout_drops_the_elements_of_unrolled_layers(setting):
  unrolled = results("rotary", None, 0.5, stored=())
  assert_close(unrolled, results("rotary", setting, 0.5, stored=()))
  (loss, _), _ = results("rotary", stored=())
  (loss_with_dropout, _), _ = unrolled
  assert abs(loss - loss_with_dropout) > 0.1


class DroppedOnes(nn.Module):
  """Adds ones under dropout."""

  num_calls = 0  # of all instances

  @nn.compact
  def __call__(self, x, *, deterministic):
    DroppedOnes.num_calls += 1
    dropped = Dropout(0.5)(jnp.ones_like(x), deterministic=deterministic)
    return x + self.param("one", nn.initializers.ones, ()) * dropped


class Stack(nn.Module):
  """Four layers."""

  scan_layers: bool

  def setup(self):
    self.layer = [DroppedOnes() for _ in range(4)]

  def __call__(self, x, *, deterministic):
    config = TransformerConfig(scan_layers=self.scan_layers)
    return apply_layers(self.layer, config, x, deterministic=deterministic)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_layers_are_traced_once_and_drop_other_elements(scan_layers):
  zeros, rngs = jnp.zeros((1, 1, 512)), {"dropout": jax.random.key(2)}
  stack = Stack(scan_layers)
  variables = stack.init(jax.random.key(0), zeros, deterministic=True)
  before = DroppedOnes.num_calls
  apply = functools.partial(stack.apply, deterministic=False, rngs=rngs)
  sums = jax.jit(apply)(variables, zeros)
  assert DroppedOnes.num_calls == before + 1
  np.testing.assert_array_equal(apply(variables, zeros), sums)
  share = {
    total: count / 512
    for total, count in Counter(np.ravel(sums).tolist()).items()
  }
  binomial = {0: 1 / 16, 2: 4 / 16, 4: 6 / 16, 6: 4 / 16, 8: 1 / 16}
  assert share == pytest.approx(binomial, abs=0.06)


def lengths_of_loops(function, *arguments):
  """The lengths of the loops of more than one step, in their order."""
  program = jax.make_jaxpr(function)(*arguments)
  scans = [
    equation.params
    for equation in equations(program)
    if equation.primitive.name == "scan"
  ]
  return [scan["length"] for scan in scans if scan["length"] > scan["unroll"]]


@sampled("setting", [None, "scan"], default=["scan"])
def test_programs_have_a_loop_for_each_stack(setting):
  settings = SETTINGS[setting] if setting else {}
  model = make_model(encoder_layers=3, decoder_layers=2, **settings)
  optimizer, batch = optax.sgd(0.1), Batch(SOURCE, TARGET)
  state = jax.eval_shape(lambda: init_state(model, optimizer, seed=0))
  train, evaluate = make_train_step(model, optimizer), make_loss_step(model)
  forward = [3, 2] if setting else []
  assert lengths_of_loops(evaluate, state.params, batch) == forward
  assert lengths_of_loops(train, state, batch) == forward + forward[::-1]


@pytest.mark.exhaustive
def test_rematerialisation_saves_memory():
  def temporaries(remat):
    # Without a loop, XLA's CPU backend merges the recomputation again.
    model = make_model(
      encoder_layers=4,
      decoder_layers=4,
      model_size=32,
      scan_layers=True,
      remat=remat,
    )
    tokens = jnp.full((8, 64), 3)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens, tokens)
    loss = lambda *args: jnp.sin(model.apply(*args)).sum()  # noqa: E731
    compiled = (
      jax.jit(jax.grad(loss)).lower(variables, tokens, tokens).compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(remat=True) < 0.7 * temporaries(remat=False)
