"""Where each token of a target looked in its source.

Axes: B batch, S source, T target, P panels (heads) of attention weights.
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn

from experiments.data.batch import BOS


def alignments(
  model: nn.Module, params: Any, source: jax.Array, target: jax.Array
) -> jax.Array:
  """Follows a given target and returns where each of its tokens looked.

  Args:
    model: the model.
    params: its parameters.
    source: [B, S] token ids.
    target: [B, T] token ids.

  Returns:
    [B, P, T, S] attention weights, one panel a head.

  Raises:
    AssertionError: if source or target is not of rank 2.

  Example:
    >>> from experiments.models.rnn.seq2seq import Seq2Seq
    >>> model = Seq2Seq(9, 9, embedding_size=4, hidden_size=6)
    >>> source, target = jnp.array([[3, 4, 2]]), jnp.array([[4, 2]])
    >>> def look(rng):
    ...   params = model.init(rng, source, target)["params"]
    ...   return alignments(model, params, source, target)
    >>> jax.eval_shape(look, jax.random.key(0)).shape
    (1, 1, 2, 3)
  """
  chex.assert_rank([source, target], 2, custom_message="source, target")
  variables = {"params": params}
  start: Any = model.apply(variables, source, target.shape[1], method="start")
  memory, carry = start

  def follow(carry, token):
    step: Any = model.apply(variables, memory, carry, token, method="step")
    carry, _, weights = step
    return carry, weights

  inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
  _, weights = jax.lax.scan(follow, carry, inputs.T)
  return weights.transpose(1, 2, 0, 3)
