"""Attention weights of given targets.

Axes: B batch, S source, T target, P heads of all layers.
"""

from typing import Any

import chex
import jax
from flax import linen as nn

from experiments.data.batch import shift_right


def target_attention_weights(
  model: nn.Module, params: Any, source: jax.Array, target: jax.Array
) -> jax.Array:
  """Returns the attention weights of each token of given targets."""
  chex.assert_rank([source, target], 2, custom_message="source, target")
  variables = {"params": params}
  start: Any = model.apply(variables, source, target.shape[1], method="start")
  memory, carry = start

  def next_step(carry, token):
    step: Any = model.apply(variables, memory, carry, token, method="step")
    carry, _, weights = step
    return carry, weights

  _, weights = jax.lax.scan(next_step, carry, shift_right(target).T)
  return weights.transpose(1, 2, 0, 3)
