"""Stick-breaking attention, whose weights depend on the order of the keys."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from attention.normalizers.base import Normalizer

_BLOCK = 128  # keys of a product
_LOWEST = -1e4  # exp of it is 0; lower sums of blocks could be infinite


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
    # log(1 - sigmoid(score)), 0 where hidden. With the score added it is
    # log(sigmoid(score)).
    rest = -jax.nn.softplus(scores)
    return jnp.exp(scores + rest + _sums_of_later(rest))


def _sums_of_later(terms: jax.Array) -> jax.Array:
  """The sum of all later entries of a row, for each entry."""
  # Products with triangular matrices, which take a fraction of the time of
  # `jax.lax.cumsum`. Subtracting an own term from a sum would lose digits.
  *leading, length = terms.shape
  # A length may be a symbol of `jax.export`.
  if not isinstance(length, int) or length <= _BLOCK:
    return _times_triangle(terms)
  count = -(-length // _BLOCK)
  widths = [(0, 0)] * len(leading) + [(0, -length % _BLOCK)]
  blocks = jnp.pad(terms, widths).reshape(*leading, count, _BLOCK)
  of_blocks = jnp.maximum(jnp.sum(blocks, axis=-1), _LOWEST)
  later_blocks = _sums_of_later(of_blocks)
  sums = _times_triangle(blocks) + later_blocks[..., None]
  return sums.reshape(*leading, count * _BLOCK)[..., :length]


def _times_triangle(terms: jax.Array) -> jax.Array:
  index = jnp.arange(terms.shape[-1])
  is_later = (index[:, None] > index[None]).astype(terms.dtype)
  return jnp.matmul(terms, is_later, precision=jax.lax.Precision.HIGHEST)
