"""The attention weights of a model on pairs of source and target."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.config import TransformerConfig
from experiments.data.batch import Array, shift_right

CROSS, ENCODER, DECODER = KINDS = (
  "cross-attention",
  "encoder self-attention",
  "decoder self-attention",
)


def attention_weights(
  model: Any, params: Any, source: Array, target: Array
) -> dict[str, jax.Array]:
  """Returns the weights of all layers and heads, by kind of attention.

  Args:
    model: from `make_model`.
    params: its parameters.
    source: [B, S] token ids.
    target: [B, T] token ids; row t of the weights belongs to the prediction of
      target token t, and column s of the decoder's self-attention to the
      decoder's input s: the start symbol, then the target.

  Returns:
    float32 arrays with L layers and H heads: "cross-attention" [B, L, H, T, S]
    and, for a Transformer, "encoder self-attention" [B, L, H, S, S] and
    "decoder self-attention" [B, L, H, T, T]. Empty for an RNN without
    attention.

  Raises:
    AssertionError: if source or target have another rank.

  Example:
    >>> from experiments.config import TransformerConfig
    >>> from experiments.models import make_model
    >>> model = make_model(
    ...   TransformerConfig(encoder_layers=1, decoder_layers=2, num_heads=4),
    ...   source_vocabulary_size=9, target_vocabulary_size=9,
    ...   shared_vocabulary=True, max_length=8, dtype="float32",
    ... )
    >>> source = target = jnp.array([[3, 4, 2]])
    >>> def weights(rng):
    ...   params = model.init(rng, source, target)["params"]
    ...   return attention_weights(model, params, source, target)
    >>> shapes = jax.eval_shape(weights, jax.random.key(0))
    >>> shapes["cross-attention"].shape
    (1, 2, 4, 3, 3)
  """
  chex.assert_rank([source, target], 2, custom_message="source, target")
  if isinstance(model.config, TransformerConfig):
    weights = _of_transformer(model, params, source, target)
  elif model.config.attention == "none":
    return {}
  else:
    weights = {CROSS: _of_steps(model, params, source, target)[:, None]}
  return {kind: array.astype(jnp.float32) for kind, array in weights.items()}


def _of_transformer(model: nn.Module, params, source, target):
  """Collects the weights that the layers store during a forward pass."""
  _, variables = model.apply(
    {"params": params},
    source,
    target,
    method="features",
    mutable=["intermediates"],
  )
  config: TransformerConfig = model.config
  stored = variables["intermediates"]

  def stacked(side: str, layers: int, name: str) -> jax.Array:
    each = (stored[f"{side}_{layer}"][name][0] for layer in range(layers))
    return jnp.stack(list(each), axis=1)

  encoder, decoder = config.encoder_layers, config.decoder_layers
  return {
    CROSS: stacked("decoder", decoder, "cross_attention_weights"),
    ENCODER: stacked("encoder", encoder, "self_attention_weights"),
    DECODER: stacked("decoder", decoder, "self_attention_weights"),
  }


def _of_steps(model: nn.Module, params, source, target) -> jax.Array:
  """Collects the weights [B, 1, T, S] of an RNN's steps over a target."""
  variables = {"params": params}
  start: Any = model.apply(variables, source, target.shape[1], method="start")
  memory, carry = start

  def next_step(carry, token):
    step: Any = model.apply(variables, memory, carry, token, method="step")
    carry, _, weights = step
    return carry, weights

  _, weights = jax.lax.scan(next_step, carry, shift_right(target).T)
  return weights.transpose(1, 2, 0, 3)
