"""The Transformer encoder-decoder, with any score in its heads.

Axes: B batch, S source, T target, D model, H heads, V vocabulary.
"""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from attention import positions
from attention.cache import Cache
from attention.modules import KeyValue, MeshAxes
from experiments.data.batch import BOS, PAD
from experiments.distributed.sharding import (
  ALONE,
  constrain,
  ring_order,
  sequence_order,
)
from experiments.models.layers.affine import Affine, AffineWeights
from experiments.models.transformer.layers import (
  DecoderLayer,
  EncoderLayer,
  Options,
)


class Memory(NamedTuple):
  """What the decoder looks at across; the same at every step.

  Attributes:
    layers: the keys and values [B, H, S, D / H] of each layer, projected.
    mask: [B, 1, 1, S], False at padding.
  """

  layers: tuple[KeyValue, ...]
  mask: jax.Array


class Carry(NamedTuple):
  """What one decoding step hands to the next.

  Attributes:
    caches: the keys and values decoded so far, one cache a layer.
    position: the number of tokens decoded so far, a scalar.
  """

  caches: tuple[Cache, ...]
  position: jax.Array


class Transformer(nn.Module):
  """The encoder-decoder of "Attention Is All You Need", Vaswani et al., 2017.

  See https://arxiv.org/abs/1706.03762, section 3.

  Attributes:
    source_vocabulary_size: number of source tokens.
    target_vocabulary_size: V.
    model_size: D.
    feed_forward_size: of the hidden layer of the feed-forward networks.
    num_heads: H.
    max_length: the longest source or target, for learned positions.
    encoder_layers: number of layers.
    decoder_layers: number of layers.
    score: of the heads, a name that `attention.modules` knows.
    norm: "pre" or "post".
    positions: "sinusoidal" or "learned" (in the embeddings), "rotary" or
      "alibi" (in self-attention), or "none".
    tied_embeddings: whether target and output share one matrix, and the
      source too where the vocabulary is shared.
    shared_vocabulary: whether equal ids mean the same on both sides.
    dropout_rate: on embeddings, sublayers and hidden layers.
    attention_dropout_rate: on attention weights.
    dtype: of the computation; parameters are float32.
    mesh_axes: of the mesh, which share heads and tokens. Tokens are then given
      and returned as `ring_order` permutes them.

  Example:
    >>> model = Transformer(
    ...   source_vocabulary_size=9, target_vocabulary_size=9, model_size=8,
    ...   feed_forward_size=16, num_heads=2, max_length=8,
    ... )
    >>> source = target = jnp.array([[3, 4, 2, 0]])
    >>> logits, variables = jax.eval_shape(
    ...   model.init_with_output, jax.random.key(0), source, target
    ... )
    >>> logits.shape
    (1, 4, 9)
  """

  source_vocabulary_size: int
  target_vocabulary_size: int
  model_size: int
  feed_forward_size: int
  num_heads: int
  max_length: int
  encoder_layers: int = 1
  decoder_layers: int = 1
  score: str = "scaled_dot"
  norm: str = "pre"
  positions: str = "sinusoidal"
  tied_embeddings: bool = True
  shared_vocabulary: bool = True
  dropout_rate: float = 0.0
  attention_dropout_rate: float = 0.0
  dtype: DTypeLike = jnp.float32
  mesh_axes: MeshAxes = ALONE

  def setup(self):
    """Declares the parameters."""
    options = Options(
      num_heads=self.num_heads,
      model_size=self.model_size,
      feed_forward_size=self.feed_forward_size,
      score=self.score,
      norm=self.norm,
      positions=self.positions,
      dropout_rate=self.dropout_rate,
      attention_dropout_rate=self.attention_dropout_rate,
      dtype=self.dtype,
      mesh_axes=self.mesh_axes,
    )
    embed = functools.partial(
      nn.Embed,
      features=self.model_size,
      dtype=self.dtype,
      embedding_init=nn.initializers.normal(self.model_size**-0.5),
    )
    self.embedding = embed(self.target_vocabulary_size)
    self.one_embedding = self.tied_embeddings and self.shared_vocabulary
    if not self.one_embedding:
      self.source_embedding = embed(self.source_vocabulary_size)
    if not self.tied_embeddings:
      self.output = AffineWeights(
        self.model_size, self.target_vocabulary_size, self.dtype
      )
    if self.positions == "learned":
      self.places = self.param(
        "positions",
        nn.initializers.normal(0.02),
        (self.max_length, self.model_size),
      )
    self.encoder = [EncoderLayer(options) for _ in range(self.encoder_layers)]
    self.decoder = [DecoderLayer(options) for _ in range(self.decoder_layers)]
    if self.norm == "pre":
      self.encoder_norm = nn.LayerNorm(dtype=self.dtype)
      self.decoder_norm = nn.LayerNorm(dtype=self.dtype)
    self.dropout = options.make_dropout()

  def __call__(
    self, source: jax.Array, target: jax.Array, *, train: bool = False
  ) -> jax.Array:
    """Predicts every target token from those before it.

    Args:
      source: [B, S] token ids, padded with PAD.
      target: [B, T] token ids, padded with PAD.
      train: whether to drop out (needs a "dropout" rng).

    Returns:
      [B, T, V] logits; those at t depend on target[:, :t] only.

    Raises:
      AssertionError: if source or target is not of rank 2.
    """
    features, readout = self.features(source, target, train=train)
    return readout(features)

  def features(
    self, source: jax.Array, target: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, Affine]:
    """Returns what `__call__` makes its logits of, and how.

    Args:
      source: [B, S] token ids, padded with PAD.
      target: [B, T] token ids, padded with PAD.
      train: whether to drop out (needs a "dropout" rng).

    Returns:
      [B, T, D], and the affine map [D, V] to logits.

    Raises:
      AssertionError: if source or target is not of rank 2.
    """
    chex.assert_rank([source, target], 2, custom_message="source, target")
    memory = self._encode(source, deterministic=not train)
    target = sequence_order(target, self.mesh_axes)
    inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
    x = self._embed_all(inputs, target=True)
    x = self.dropout(x, deterministic=not train)
    for layer, key_value in zip(self.decoder, memory.layers):
      x = layer(x, key_value, memory.mask, deterministic=not train)
    return self._normed(x), self._readout()

  def start(self, source: jax.Array, max_length: int) -> tuple[Memory, Carry]:
    """Encodes a source for decoding.

    Args:
      source: [B, S] token ids.
      max_length: T, the room in the caches.

    Returns:
      What every step reads, and what the first step starts from.
    """
    caches = tuple(
      layer.self_attention.init_cache(source.shape[:1], max_length, self.dtype)
      for layer in self.decoder
    )
    return self._encode(source, deterministic=True), Carry(
      caches, jnp.zeros((), jnp.int32)
    )

  def step(
    self, memory: Memory, carry: Carry, token: jax.Array
  ) -> tuple[Carry, jax.Array, jax.Array]:
    """Decodes one token.

    Args:
      memory: from `start`.
      carry: from `start` or the step before.
      token: [B], the token decoded last, at first BOS.

    Returns:
      The next carry, logits [B, V] and attention weights [B, P, S] over the
      source, P panels being heads, layer by layer.
    """
    x = self._embed(token[:, None], carry.position[None], target=True)
    caches, looked = [], []
    for layer, key_value, cache in zip(
      self.decoder, memory.layers, carry.caches
    ):
      x, cache, weights = layer.step(x, cache, key_value, memory.mask)
      caches.append(cache)
      looked.append(weights)
    logits = self._readout()(self._normed(x)[:, 0])
    carry = Carry(tuple(caches), carry.position + 1)
    return carry, logits, jnp.concatenate(looked, axis=1)

  def _encode(self, source: jax.Array, *, deterministic: bool) -> Memory:
    source = sequence_order(source, self.mesh_axes)
    mask = (source != PAD)[:, None, None, :]
    x = self._embed_all(source, target=False)
    x = self.dropout(x, deterministic=deterministic)
    for layer in self.encoder:
      x = layer(x, mask, deterministic=deterministic)
    if self.norm == "pre":
      x = self.encoder_norm(x)
    return Memory(
      tuple(layer.cross_attention.project(x) for layer in self.decoder), mask
    )

  def _embed_all(self, tokens: jax.Array, *, target: bool) -> jax.Array:
    """Embeds whole sequences [B, T], laid out for the devices."""
    tokens = ring_order(tokens, self.mesh_axes)
    places = self.mesh_axes.positions(tokens.shape[1])
    x = self._embed(tokens, places, target=target)
    return constrain(x, "rows", "tokens", "features")

  def _embed(self, tokens: jax.Array, places, *, target: bool) -> jax.Array:
    """Embeds [B, T] tokens that stand at [T] places."""
    own = not (target or self.one_embedding)
    x = (self.source_embedding if own else self.embedding)(tokens)
    x = x * jnp.asarray(self.model_size**0.5, x.dtype)
    if self.positions == "learned":
      table = self.places
    elif self.positions == "sinusoidal":
      table = positions.sinusoidal(self.max_length, self.model_size)
    else:
      return x
    return x + table[places][None].astype(x.dtype)

  def _normed(self, x: jax.Array) -> jax.Array:
    return self.decoder_norm(x) if self.norm == "pre" else x

  def _readout(self) -> Affine:
    if self.tied_embeddings:
      return Affine(self.embedding.embedding.T.astype(self.dtype), None)
    return self.output()
