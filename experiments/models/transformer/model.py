"""The Transformer encoder-decoder, with any score in its heads."""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from attention import positions
from attention.modules import KeyValue, MeshAxes
from experiments.config import TransformerConfig
from experiments.data.batch import PAD, shift_right
from experiments.distributed.sharding import (
  ALONE,
  constrain,
  ring_order,
  sequence_order,
)
from experiments.models.implementation import of_sequences
from experiments.models.layers.affine import Affine, AffineWeights
from experiments.models.transformer import beam_cache
from experiments.models.transformer.beam_cache import BeamCache
from experiments.models.transformer.layer_loop import apply_layers
from experiments.models.transformer.layers import (
  DecoderCache,
  DecoderLayer,
  EncoderLayer,
)
from experiments.models.transformer.options import Options


class Memory(NamedTuple):
  """The encoder's result, constant during decoding."""

  layers: tuple[KeyValue, ...]  # [B, H, S, D / H] of each layer
  mask: jax.Array  # [B, 1, 1, S], False at padding


class Carry(NamedTuple):
  """The decoder's state: a cache for each layer, and the number of tokens."""

  caches: tuple[DecoderCache, ...]
  position: jax.Array


class BeamCarry(NamedTuple):
  """The decoder's state for the hypotheses of a beam search."""

  caches: tuple[BeamCache, ...]
  ancestors: jax.Array  # [B, K, T], see beam_cache.py
  position: jax.Array


class Transformer(nn.Module):
  """The encoder-decoder of https://arxiv.org/abs/1706.03762, section 3."""

  config: TransformerConfig
  source_vocabulary_size: int
  target_vocabulary_size: int
  shared_vocabulary: bool  # whether source and target have the same token ids
  max_length: int  # of a source or target
  dtype: DTypeLike  # of the computation; parameters are float32
  mesh_axes: MeshAxes = ALONE  # shard rows, heads, and tokens in `ring_order`

  def setup(self):
    """Declares the layers."""
    config, size = self.config, self.config.model_size
    embed = functools.partial(
      nn.Embed,
      features=size,
      dtype=self.dtype,
      embedding_init=nn.initializers.normal(size**-0.5),
    )
    self.embedding = embed(self.target_vocabulary_size)
    self.single_embedding = config.tied_embeddings and self.shared_vocabulary
    if not self.single_embedding:
      self.source_embedding = embed(self.source_vocabulary_size)
    if not config.tied_embeddings:
      self.output = AffineWeights(size, self.target_vocabulary_size, self.dtype)
    if config.positions == "learned":
      init = nn.initializers.normal(0.02)
      self.position_embeddings = self.param(
        "positions", init, (self.max_length, size)
      )
    options = Options(
      config,
      self.dtype,
      self.mesh_axes,
      self.max_length,
      of_sequences(self),
    )
    self.encoder = [EncoderLayer(options) for _ in range(config.encoder_layers)]
    self.decoder = [DecoderLayer(options) for _ in range(config.decoder_layers)]
    if config.norm == "pre":
      self.encoder_norm = nn.LayerNorm(dtype=self.dtype)
      self.decoder_norm = nn.LayerNorm(dtype=self.dtype)
    self.dropout = options.make_dropout()

  def __call__(
    self, source: jax.Array, target: jax.Array, *, train: bool = False
  ) -> jax.Array:
    """Returns logits [B, T, V] of target [B, T], given source [B, S]."""
    features, readout = self.features(source, target, train=train)
    return readout(features)

  def features(
    self, source: jax.Array, target: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, Affine]:
    """Returns features [B, T, D] and the affine map to logits."""
    chex.assert_rank([source, target], 2, custom_message="source, target")
    encoded = self._encode(source, deterministic=not train)
    target = sequence_order(target, self.mesh_axes)
    x = self._embed_all(shift_right(target), target=True)
    x = self.dropout(x, deterministic=not train)
    x = apply_layers(
      self.decoder, self.config, x, *encoded, deterministic=not train
    )
    return self._normed(x), self._readout()

  def start(self, source: jax.Array, max_length: int) -> tuple[Memory, Carry]:
    """Encodes a source; the caches of the carry hold `max_length` tokens."""
    caches = tuple(
      layer.init_cache(source.shape[0], max_length) for layer in self.decoder
    )
    return self._memory(source), Carry(caches, jnp.zeros((), jnp.int32))

  def step(
    self, memory: Memory, carry: Carry, token: jax.Array
  ) -> tuple[Carry, jax.Array, jax.Array]:
    """Returns carry, logits [B, V] and weights [B, P, S], P heads in all."""
    x = self._embed(token[:, None], carry.position[None], target=True)
    caches, weights_of_layers = [], []
    for layer, key_value, cache in zip(
      self._step_layers(), memory.layers, carry.caches
    ):
      x, cache, weights = layer.step(x, cache, key_value, memory.mask)
      caches.append(cache)
      weights_of_layers.append(weights)
    logits = self._readout()(self._normed(x)[:, 0])
    carry = Carry(tuple(caches), carry.position + 1)
    return carry, logits, jnp.concatenate(weights_of_layers, axis=1)

  @property
  def has_beam_steps(self) -> bool:
    """Whether `beam_start` and `beam_step` serve the config."""
    served = beam_cache.serves(self.config, self.dtype)
    return served and self.mesh_axes == ALONE

  def beam_start(
    self, source: jax.Array, max_length: int, beam_size: int
  ) -> tuple[Memory, BeamCarry]:
    """As `start`, for K = `beam_size` hypotheses of each source."""
    batch_size = source.shape[0]
    carry = BeamCarry(
      tuple(
        beam_cache.init(layer.self_attention, batch_size, max_length, beam_size)
        for layer in self.decoder
      ),
      jnp.zeros((batch_size, beam_size, max_length), jnp.int32),
      jnp.zeros((), jnp.int32),
    )
    return self._memory(source), carry

  def beam_step(
    self,
    memory: Memory,
    carry: BeamCarry,
    token: jax.Array,
    parent: jax.Array | None,
  ) -> tuple[BeamCarry, jax.Array]:
    """Returns carry and logits [K, B, V] after the tokens [B, K].

    The hypotheses continue those of `parent` [B, K], None for their own.
    """
    caches, ancestors, position = carry
    ancestors = beam_cache.moved(ancestors, parent, position)
    slots = beam_cache.make_slots(ancestors, position)
    x = self._embed(token, position[None], target=True)
    extended = []
    layers = self._step_layers()
    for layer, cache, key_value in zip(layers, caches, memory.layers):
      x, cache = layer.beam_step(x, cache, slots, key_value, memory.mask)
      extended.append(cache)
    logits = self._readout()(self._normed(x).swapaxes(0, 1))
    return BeamCarry(tuple(extended), ancestors, position + 1), logits

  def _step_layers(self) -> list[DecoderLayer]:
    """The decoder's layers, with the library's choice of implementation."""
    # Implementations that a config names may need more than one query.
    layers = []
    for layer in self.decoder:
      if layer.options.implementation is not None:
        options = dataclasses.replace(layer.options, implementation=None)
        layer = layer.clone(options=options).bind(layer.variables)
      layers.append(layer)
    return layers

  def _memory(self, source: jax.Array) -> Memory:
    """Encodes a source and projects it for each layer of the decoder."""
    x, mask = self._encode(source, deterministic=True)
    return Memory(
      tuple(layer.cross_attention.project(x) for layer in self.decoder), mask
    )

  def _encode(
    self, source: jax.Array, *, deterministic: bool
  ) -> tuple[jax.Array, jax.Array]:
    """Returns encoder states [B, S, D] and the mask [B, 1, 1, S]."""
    source = sequence_order(source, self.mesh_axes)
    mask = (source != PAD)[:, None, None, :]
    x = self._embed_all(source, target=False)
    x = self.dropout(x, deterministic=deterministic)
    x = apply_layers(
      self.encoder, self.config, x, mask, deterministic=deterministic
    )
    if self.config.norm == "pre":
      x = self.encoder_norm(x)
    return x, mask

  def _embed_all(self, tokens: jax.Array, *, target: bool) -> jax.Array:
    """Embeds whole sequences [B, T], sharded over the devices."""
    tokens = ring_order(tokens, self.mesh_axes)
    places = self.mesh_axes.positions(tokens.shape[1])
    x = self._embed(tokens, places, target=target)
    return constrain(x)

  def _embed(self, tokens: jax.Array, places, *, target: bool) -> jax.Array:
    """Embeds [B, T] tokens at [T] positions."""
    own = not (target or self.single_embedding)
    x = (self.source_embedding if own else self.embedding)(tokens)
    x = x * jnp.asarray(self.config.model_size**0.5, x.dtype)
    if self.config.positions == "learned":
      table = self.position_embeddings
    elif self.config.positions == "sinusoidal":
      table = positions.sinusoidal(self.max_length, self.config.model_size)
    else:
      return x
    return x + table[places][None].astype(x.dtype)

  def _normed(self, x: jax.Array) -> jax.Array:
    return self.decoder_norm(x) if self.config.norm == "pre" else x

  def _readout(self) -> Affine:
    if self.config.tied_embeddings:
      return Affine(self.embedding.embedding.T.astype(self.dtype), None)
    return self.output()
