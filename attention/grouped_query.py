"""Grouped-query attention: fewer key/value heads than heads.

Head h looks at key/value head h // G, with G = H / K. That is heads laid out
as [K, G] against [K, 1], which broadcasts, so nothing is repeated. See "GQA:
Training Generalized Multi-Query Transformer Models from Multi-Head
Checkpoints", Ainslie et al., 2023 (https://arxiv.org/abs/2305.13245).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from attention.biases import Bias, as_bias
from attention.masks.types import Mask, as_mask
from attention.scores import Score, as_score


@dataclasses.dataclass(frozen=True)
class Grouping:
  """Moves arrays, scores, masks and biases from [H] to [K, G] and back.

  With as many key/value heads as heads nothing moves.
  """

  num_heads: int
  num_key_value_heads: int

  def __post_init__(self):
    heads, memory_heads = self.num_heads, self.num_key_value_heads
    if memory_heads < 1 or heads % memory_heads:
      raise ValueError(
        f"the number of heads, {heads}, must be a multiple of the number of "
        f"key/value heads, {memory_heads}"
      )

  @property
  def trivial(self) -> bool:
    """Whether heads stay as [H]."""
    return self.num_heads == self.num_key_value_heads

  @property
  def shape(self) -> tuple[int, int]:
    """(K, G)."""
    return (
      self.num_key_value_heads,
      self.num_heads // self.num_key_value_heads,
    )

  def query(self, query: jax.Array) -> jax.Array:
    """[..., H, T, D] to [..., K, G, T, D]."""
    if self.trivial:
      return query
    leading, rest = query.shape[:-3], query.shape[-2:]
    return jnp.reshape(query, (*leading, *self.shape, *rest))

  def memory(self, memory: jax.Array) -> jax.Array:
    """Keys or values [..., K, S, D] to [..., K, 1, S, D]."""
    return memory if self.trivial else memory[..., None, :, :]

  def heads(self, grouped: jax.Array) -> jax.Array:
    """[..., K, G, T, E] back to [..., H, T, E]."""
    if self.trivial:
      return grouped
    leading, rest = grouped.shape[:-4], grouped.shape[-2:]
    return jnp.reshape(grouped, (*leading, self.num_heads, *rest))

  def score(self, score: Any) -> Score:
    """A score whose parameters line up with [K, G]."""
    score = as_score(score)
    return score if self.trivial else score.group_heads(*self.shape)

  def mask(self, mask: Any) -> Mask | None:
    """A mask for [..., K, G, T, S] from one for [..., H, T, S]."""
    if mask is None or self.trivial:
      return mask
    return as_mask(mask).grouped(*self.shape)

  def bias(self, bias: Any) -> Bias | None:
    """A bias for [..., K, G, T, S] from one for [..., H, T, S]."""
    if bias is None or self.trivial:
      return bias
    return as_bias(bias).grouped(*self.shape)
