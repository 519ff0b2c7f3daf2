"""`flax_attention_fn` in Flax's modules, Linen's and NNX's."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attention import (
  attend,
  flax_attention_fn,
  general_score,
  normalizers,
  scores,
)
from tests.attention import comparison
from tests.attention.oracle import draw

close = functools.partial(comparison.close, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def _ranks_are_promoted_as_in_flax():
  with jax.numpy_rank_promotion("allow"):
    yield


def tokens(*shape, seed=0):
  return jnp.asarray(draw(seed, shape)[0], jnp.float32)


def nnx_layer(attention_fn, **options):
  return nnx.MultiHeadAttention(
    num_heads=2,
    in_features=8,
    decode=False,
    rngs=nnx.Rngs(0),
    attention_fn=attention_fn,
    **options,
  )


@pytest.mark.parametrize(
  "options",
  [{}, {"precision": "highest"}, {"dropout_rate": 0.3, "deterministic": False}],
  ids=["plain", "precision", "dropout"],
)
@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_nnx_layer_gives_equal_outputs_and_weights(options):
  @nnx.jit
  def run(layer, inputs):
    return layer(inputs, is_causal=True, sow_weights=True)

  results = []
  for attention_fn in (nnx.dot_product_attention, flax_attention_fn()):
    layer = nnx_layer(attention_fn, **options)
    output = run(layer, tokens(2, 7, 8))
    sown = nnx.pop(layer, nnx.Intermediate)["attention_weights"]
    results.append((output, sown.get_value()[0]))
  close(*results)


def test_nnx_layer_decodes_a_causal_sequence():
  inputs = tokens(2, 5, 8)
  layer = nnx_layer(flax_attention_fn())
  whole = nnx.jit(lambda layer, inputs: layer(inputs, is_causal=True))(
    layer, inputs
  )
  layer.set_attributes(decode=True)
  layer.init_cache(inputs.shape)
  decode = nnx.jit(lambda layer, token: layer(token))
  steps = [decode(layer, inputs[:, step : step + 1]) for step in range(5)]
  close(jnp.concatenate(steps, axis=1), whole)


class Kept:
  """A module that keeps what is sown."""

  def sow(self, collection, name, weights):
    self.sown = collection, name, weights


def test_weights_of_grouped_heads_equal_those_of_repeated_keys():
  query, key = tokens(2, 5, 4, 8), tokens(2, 6, 2, 8, seed=1)
  mask = np.tril(np.ones((5, 6), bool))

  @jax.jit
  def run(query, memory):
    kept = Kept()
    context = flax_attention_fn()(query, memory, memory, mask=mask, module=kept)
    assert kept.sown[:2] == (nnx.Intermediate, "attention_weights")
    return context, kept.sown[2]

  grouped, repeated = run(query, key), run(query, jnp.repeat(key, 2, axis=-2))
  assert grouped[1].shape == (2, 4, 5, 6)
  close(grouped, repeated)


def with_weights(layer, inputs):
  """What a layer returns and sows, with new variables."""

  @jax.jit
  def run(rng, inputs):
    variables = layer.init(rng, inputs)
    options = {"sow_weights": True, "mutable": ["intermediates"]}
    return layer.apply(variables, inputs, **options)

  return run(jax.random.key(0), inputs)


@pytest.mark.parametrize("force", [False, True])
def test_linen_layer_sows_weights_of_the_dtype_of_flax(force):
  kept = []
  for attention_fn in (nn.dot_product_attention, flax_attention_fn()):
    layer = nn.MultiHeadDotProductAttention(
      2,
      dtype=jnp.bfloat16,
      force_fp32_for_softmax=force,
      attention_fn=attention_fn,
    )
    _, state = with_weights(layer, tokens(2, 6, 8))
    kept.append(state["intermediates"]["attention_weights"][0])
  theirs, ours = kept
  assert ours.dtype == theirs.dtype == (jnp.float32 if force else jnp.bfloat16)
  theirs, ours = (np.asarray(each, np.float32) for each in kept)
  np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGHEST])
def test_precision_applies_to_all_products_and_their_gradients(precision):
  attention_fn = functools.partial(flax_attention_fn(), precision=precision)

  def loss(query):
    return jnp.sum(attention_fn(query, query, query))

  closed = jax.make_jaxpr(jax.grad(loss))(tokens(5, 2, 4))
  found = list(comparison.products(closed.jaxpr))
  assert found
  assert set(found) == {(jax.lax.Precision.HIGHEST,) * 2}


def test_linen_layer_with_another_normalizer():
  layer = nn.MultiHeadDotProductAttention(
    2, attention_fn=flax_attention_fn(normalizer=normalizers.sparsemax())
  )
  _, sown = with_weights(layer, 3.0 * tokens(2, 7, 8))
  weights = np.asarray(sown["intermediates"]["attention_weights"][0])
  np.testing.assert_allclose(np.sum(weights, axis=-1), 1.0, rtol=1e-5)
  assert np.any(weights == 0.0)


def test_inputs_are_promoted_to_one_dtype():
  query, key = tokens(5, 2, 4).astype(jnp.bfloat16), tokens(6, 2, 4)
  context = jax.eval_shape(flax_attention_fn(), query, key, key)
  assert context.dtype == jnp.float32


def test_a_parameter_of_nnx_may_be_an_array_of_a_score():
  weight = tokens(4, 4)
  parameter = nnx.Param(weight)
  query, key = tokens(5, 4), tokens(6, 4)
  contexts = comparison.jitted(attend)
  close(
    contexts(query, key, key, score=scores.general(parameter)),
    contexts(query, key, key, score=scores.general(weight)),
  )
  table = comparison.jitted(general_score)(query, key, weight=parameter)
  close(table, np.asarray(query @ weight @ key.T))
