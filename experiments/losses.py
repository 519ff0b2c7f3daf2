"""What training minimises."""

import chex
import jax
import jax.numpy as jnp

from experiments.data.batch import PAD, Array


def cross_entropy(
  logits: jax.Array, labels: Array, *, label_smoothing: float = 0.0
) -> jax.Array:
  """Label-smoothed cross-entropy of every token that is not PAD.

  The smoothed distribution gives 1 - e to the label and spreads e over the
  whole vocabulary. See "Rethinking the Inception Architecture for Computer
  Vision", Szegedy et al., 2015, section 7 (https://arxiv.org/abs/1512.00567).

  Args:
    logits: [B, T, V], of any float dtype; the sums are float32 at least.
    labels: [B, T] token ids; PAD costs nothing.
    label_smoothing: e, from 0 to 1.

  Returns:
    [B, T] losses in nats, 0 where the label is PAD.

  Raises:
    AssertionError: if logits and labels do not fit.

  Example:
    >>> losses = cross_entropy(jnp.zeros((1, 2, 4)), jnp.array([[3, 0]]))
    >>> [round(float(loss), 3) for loss in losses[0]]
    [1.386, 0.0]
  """
  chex.assert_shape(logits, (*labels.shape, None), custom_message="logits")
  logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
  spread = log_probs.mean(-1)
  losses = -(1 - label_smoothing) * chosen - label_smoothing * spread
  return jnp.where(labels == PAD, 0, losses)
