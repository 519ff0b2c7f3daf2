"""Attention weights of all layers are those that the model used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from experiments.data.batch import PAD, shift_right
from experiments.models.attention_weights import attention_weights
from tests.experiments.models.test_models import (
  MODELS,
  SOURCE,
  TARGET,
  parameters,
)
from tests.matrix import sampled

TRANSFORMERS = [name for name in MODELS if name.startswith("transformer")]
DEFAULT = "transformer"


def recorded(name, params):
  """The inputs and outputs of all attention modules, and the weights."""
  calls = {}

  def record(call, args, kwargs, context):
    result = call(*args, **kwargs)
    if context.method_name in ("__call__", "attend_projected") and (
      "attention" in context.module.path[-1]
    ):
      layer, module = context.module.path
      calls[layer, module] = args, result
    return result

  with nn.intercept_methods(record):
    weights = attention_weights(MODELS[name], params, SOURCE, TARGET)
  return calls, weights


@sampled("name", TRANSFORMERS, default=[DEFAULT])
def test_weights_and_values_give_the_outputs_of_every_layer(name):
  params = parameters(name)
  calls, weights = jax.jit(lambda params: recorded(name, params))(params)
  config = MODELS[name].config
  assert len(calls) == config.encoder_layers + 2 * config.decoder_layers
  for (layer, module), (args, outputs) in calls.items():
    side, index = layer.split("_")
    kind = f"{side} {module}".replace("_", "-")
    if module == "cross_attention":
      kind, values = "cross-attention", args[1].value  # [B, H, S, D / H]
    else:
      kernel, bias = projection(params[layer][module]["value_projection"])
      values = np.einsum("bsd,dhe->bhse", args[0], kernel) + bias[:, None]
    contexts = weights[kind][:, int(index)] @ np.asarray(values)
    kernel, bias = projection(params[layer][module]["output_projection"])
    expected = np.einsum("bhte,hed->btd", contexts, kernel) + bias
    np.testing.assert_allclose(outputs, expected, atol=2e-5)


def projection(params):
  return np.asarray(params["kernel"]), np.asarray(params["bias"])


@pytest.mark.exhaustive
def test_cross_attention_weights_equal_those_of_decoding_steps():
  model, variables = MODELS[DEFAULT], {"params": parameters(DEFAULT)}

  @jax.jit
  def both(variables):
    memory, carry = model.apply(variables, SOURCE, 5, method="start")
    of_steps = []
    for token in shift_right(TARGET).T:
      carry, _, weights = model.apply(
        variables, memory, carry, token, method="step"
      )
      of_steps.append(weights)
    whole = attention_weights(model, variables["params"], SOURCE, TARGET)
    return jnp.stack(of_steps, axis=2), whole["cross-attention"]

  of_steps, whole = both(variables)
  real = np.asarray(TARGET != PAD)[:, None, :, None]
  np.testing.assert_allclose(
    of_steps * real, np.reshape(whole, of_steps.shape) * real, atol=2e-5
  )


@sampled("name", MODELS, default=["none-luong", "dot-luong", "transformer"])
def test_every_layer_and_head_has_weights(name):
  params = jax.eval_shape(MODELS[name].init, jax.random.key(0), SOURCE, TARGET)
  source = jnp.pad(SOURCE, ((0, 0), (0, 1)))
  weights = jax.eval_shape(
    lambda params: attention_weights(MODELS[name], params, source, TARGET),
    params["params"],
  )
  shapes = {kind: array.shape for kind, array in weights.items()}
  if name.startswith("none"):
    assert shapes == {}
  elif not name.startswith("transformer"):
    assert shapes == {"cross-attention": (2, 1, 1, 5, 6)}
  else:
    layers = MODELS[name].config.decoder_layers
    assert shapes == {
      "cross-attention": (2, layers, 2, 5, 6),
      "encoder self-attention": (2, 1, 2, 6, 6),
      "decoder self-attention": (2, layers, 2, 5, 5),
    }
