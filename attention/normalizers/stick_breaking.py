"""Stick-breaking attention, whose weights depend on the order of the keys."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention.normalizers.base import Normalizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StickBreaking(Normalizer):
  """sigmoid(s_j) * prod_{k > j} (1 - sigmoid(s_k)), from the last key on.

  Each visible key, from the last to the first, gets the share sigmoid(s_j) of
  the weight that the keys after it have left. Combine it with
  `masks.causal(-1)`, as in "Stick-breaking Attention", Tan et al., 2024
  (https://arxiv.org/abs/2410.17980).

  Example:
    >>> import jax.numpy as jnp
    >>> from attention.normalizers import stick_breaking
    >>> stick_breaking()(jnp.zeros((1, 3)))
    Array([[0.125, 0.25 , 0.5  ]], dtype=float32)
  """

  ignores_hidden: ClassVar[bool] = True

  def __call__(self, scores):
    # log(1 - sigmoid(score)), 0 where hidden.
    rest = -jax.nn.softplus(scores)
    later = jax.lax.cumsum(rest, axis=scores.ndim - 1, reverse=True) - rest
    return jax.nn.sigmoid(scores) * jnp.exp(later)
