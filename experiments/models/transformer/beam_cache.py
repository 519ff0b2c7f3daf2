"""One cache for all hypotheses of a beam search, whose tokens never move.

Axes: B batch, K hypotheses of a source, T tokens, H heads, D and E features.
The token that hypothesis k appends at position t stays in slot t * K + k. Each
hypothesis stores which hypothesis appended its token at each position, and a
mask hides the slots of the others. Reordering K caches at each step would take
longer than the K times as many scores.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from attention.modules import KeyValue, MultiHeadAttention
from attention.request import Request
from experiments.config import TransformerConfig


class BeamCache(NamedTuple):
  """The keys and values of a layer's tokens."""

  key: jax.Array  # [B, H, D, T * K]: XLA would transpose [B, H, T * K, D]
  value: jax.Array  # [B, H, T * K, E]


class Slots(NamedTuple):
  """The slots of one step, the same in all layers."""

  position: jax.Array  # of the new tokens, int32
  visible: jax.Array  # bool [B, 1, K, T * K]


def serves(config: TransformerConfig, dtype: DTypeLike) -> bool:
  """Whether self-attention is what `decode` computes."""
  return (
    config.score in ("dot", "scaled_dot", "general", "cosine")
    and config.score_wrapper == "none"
    and config.normalizer == "softmax"
    and config.positions != "alibi"
    and not config.has_forget_gates
    and jnp.dtype(dtype) == jnp.float32
  )


def make_slots(ancestors: jax.Array, position: jax.Array) -> Slots:
  """Returns the slots that hypotheses with ancestors [B, K, T] attend to."""
  batch_size, beam_size, length = ancestors.shape
  own = ancestors[..., None] == jnp.arange(beam_size)[None, None, None]
  visible = own & (jnp.arange(length) <= position)[None, None, :, None]
  shape = (batch_size, 1, beam_size, length * beam_size)
  return Slots(position, visible.reshape(shape))


def moved(
  ancestors: jax.Array, parent: jax.Array | None, position: jax.Array
) -> jax.Array:
  """Returns the ancestors [B, K, T] of continuations of `parent` [B, K]."""
  if parent is not None:
    ancestors = jnp.take_along_axis(ancestors, parent[..., None], axis=1)
  beams = jnp.arange(ancestors.shape[1])
  return ancestors.at[:, :, position].set(beams[None])


def init(
  attention: MultiHeadAttention,
  batch_size: int,
  max_length: int,
  beam_size: int,
) -> BeamCache:
  """Returns an empty cache."""
  tokens = attention.init_cache((batch_size,), max_length * beam_size)
  return BeamCache(tokens.key.swapaxes(-1, -2), tokens.value)


def decode(
  attention: MultiHeadAttention,
  inputs: jax.Array,  # [B, K, D]
  cache: BeamCache,
  slots: Slots,
) -> tuple[jax.Array, BeamCache]:
  """Appends the new tokens and attends to each hypothesis' own."""
  beam_size = inputs.shape[1]
  positions = jnp.full(beam_size, slots.position)
  key, value = attention.project(inputs, positions=positions)
  start = slots.position * beam_size
  update = jax.lax.dynamic_update_slice_in_dim
  cache = BeamCache(
    update(cache.key, key.swapaxes(-1, -2), start, axis=3),
    update(cache.value, value, start, axis=2),
  )
  outputs: Any = attention.clone(implementation=_ColumnKeys()).apply(
    attention.variables,
    inputs,
    KeyValue(cache.key.swapaxes(-1, -2), cache.value),
    mask=slots.visible,
    positions=positions,
    method="attend_projected",
  )
  return outputs, cache


class _ColumnKeys:
  """The softmax of dot products with keys that are stored as [B, H, D, S]."""

  def obstacle(self, request: Request) -> str | None:
    """None: it serves every request of `decode`."""
    del request
    return None

  def __call__(self, request: Request) -> tuple[jax.Array, None]:
    """The context [B, H, K, E], and no lse."""
    assert request.mask is not None
    rows, columns = (jnp.arange(size) for size in request.scores_shape[-2:])
    visible = request.mask.block(rows, columns, request.query.ndim - 2)
    query = request.score.map_query(request.query)
    scores = query @ request.key.swapaxes(-1, -2)
    scores = jnp.where(visible, scores, -jnp.inf)
    return jax.nn.softmax(scores) @ request.value, None
