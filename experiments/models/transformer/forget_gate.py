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
from attention.scores.decay import running_sums


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
  # The difference of two sums of thousands of gates would not be exact.
  of_queries, of_keys, rest = running_sums(log_gates)
  rest = jax.lax.stop_gradient(rest)
  bias = biases.as_bias(of_queries[..., :, None]) - of_keys[..., None, :]
  return bias + rest[..., :, None] - rest[..., None, :]
