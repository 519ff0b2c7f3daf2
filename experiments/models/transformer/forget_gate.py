"""Forget gates of causal self-attention (Lin et al., 2025, arXiv:2503.02130).

The score of query i and key j is increased by the logarithms of the gates from
j + 1 to i, so each head learns how fast it forgets.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from attention import biases
from attention.biases import Bias


class ForgetGate(nn.Module):
  """The logarithm of a gate for each head and token."""

  num_heads: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps [B, T, D] to [B, H, T] in float32."""
    logits = nn.Dense(self.num_heads, dtype=self.dtype, name="dense")(x)
    log_gates = jax.nn.log_sigmoid(logits.astype(jnp.float32))
    return jnp.moveaxis(log_gates, -1, -2)


def decay(log_gates: jax.Array) -> Bias:
  """Returns the bias of scores [B, H, T, T] from gates [B, H, T]."""
  total = jnp.cumsum(log_gates, axis=-1)
  return biases.as_bias(total[..., :, None]) - total[..., None, :]
