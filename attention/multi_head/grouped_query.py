"""Grouped-query attention: head h uses key/value head h // G, G = H / K.

See Ainslie et al., 2023 (https://arxiv.org/abs/2305.13245). Heads have axes
[K, G] and key/value heads [K, 1], which broadcast: nothing is repeated.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention.arrays import axes
from attention.arrays.meshes import on_any_mesh
from attention.biases import as_bias
from attention.dispatch import dispatch, dispatch_weights
from attention.masks.types import as_mask
from attention.normalizers import as_normalizer, group_heads
from attention.scores import Score, as_score


class KeyValue(NamedTuple):
  """The projected keys [..., K, S, D] and values [..., K, S, E] of a memory.

  Keys are rotated and mapped by the score; they are [..., H, S, D] if the score
  maps keys differently for each head.
  """

  key: jax.Array
  value: jax.Array


@dataclasses.dataclass(frozen=True)
class Grouping:
  """Converts heads [H] to [K, G] and back; with H = K, it converts nothing."""

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
    """Whether H = K."""
    return self.num_heads == self.num_key_value_heads

  @property
  def shape(self) -> tuple[int, int]:
    """(K, G)."""
    memory_heads = self.num_key_value_heads
    return memory_heads, self.num_heads // memory_heads

  def query(self, query: jax.Array) -> jax.Array:
    """[..., H, T, D] to [..., K, G, T, D]."""
    return query if self.trivial else axes.split_axis(query, -3, *self.shape)

  def memory(self, memory: jax.Array) -> jax.Array:
    """[..., K, S, D] to [..., K, 1, S, D]; [..., H, S, D] as in `query`."""
    if self.trivial:
      return memory
    if memory.shape[-3] == self.num_heads:
      return self.query(memory)
    return memory[..., None, :, :]

  def heads(self, grouped: jax.Array) -> jax.Array:
    """The inverse of `query` and of `memory`."""
    if self.trivial:
      return grouped
    *leading, outer, inner, length, size = grouped.shape
    return jnp.reshape(grouped, (*leading, outer * inner, length, size))

  def score(self, score: Any) -> Score:
    """A score for heads [K, G] from one for heads [H]."""
    score = as_score(score)
    return score if self.trivial else score.group_heads(*self.shape)

  def arguments(
    self, *, score: Any, mask: Any, bias: Any, normalizer: Any = None
  ) -> dict[str, Any]:
    """These arguments for [..., K, G, T, S] from those for [..., H, T, S]."""
    normalizer = as_normalizer(normalizer)
    if not self.trivial:
      mask = None if mask is None else as_mask(mask).grouped(*self.shape)
      bias = None if bias is None else as_bias(bias).grouped(*self.shape)
      normalizer = group_heads(normalizer, *self.shape)
    return {
      "score": self.score(score),
      "mask": mask,
      "bias": bias,
      "normalizer": normalizer,
    }


@on_any_mesh("TE", "T")
def attend_heads(
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  *,
  score: Score | Callable,
  mask: Any,
  bias: Any,
  normalizer: Any = None,
  attend: Callable = dispatch,
  **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
  """`dispatch` for heads [H] of queries, [K] of values, [K] or [H] of keys."""
  grouping = Grouping(query.shape[-3], value.shape[-3])
  context, lse = attend(
    grouping.query(query),
    grouping.memory(key),
    grouping.memory(value),
    **grouping.arguments(
      score=score, mask=mask, bias=bias, normalizer=normalizer
    ),
    **options,
  )
  if lse is not None:
    lse = grouping.heads(lse[..., None])[..., 0]
  return grouping.heads(context), lse


def heads_weights(
  query: jax.Array, key: jax.Array, **arguments: Any
) -> jax.Array:
  """The weights [..., H, T, S], float32 at least; as in `attend_heads`."""
  grouping = Grouping(query.shape[-3], key.shape[-3])
  weights = dispatch_weights(
    grouping.query(query),
    grouping.memory(key),
    **grouping.arguments(**arguments),
  )
  return grouping.heads(weights)
