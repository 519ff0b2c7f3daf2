"""The Transformer encoder-decoder, with any score in its heads.

Axes: B batch, S source, T target, D model, H heads, V vocabulary.
"""

import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from attention import masks, positions
from attention.cache import Cache
from attention.modules import KeyValue, MultiHeadAttention
from experiments.data.batch import BOS, PAD


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


@dataclasses.dataclass(frozen=True)
class Options:
  """What all layers of a Transformer share.

  Attributes:
    num_heads: H.
    model_size: D.
    feed_forward_size: of the hidden layer of the feed-forward networks.
    score: of the heads.
    norm: "pre" normalises what enters a sublayer (Xiong et al., 2020,
      https://arxiv.org/abs/2002.04745), "post" what leaves it, as the first
      paper does.
    rotary: whether self-attention rotates queries and keys by position.
    dropout_rate: on sublayers and hidden layers.
    dtype: of the computation.

  Example:
    >>> options = Options(
    ...   num_heads=2, model_size=8, feed_forward_size=16, score="scaled_dot",
    ...   norm="pre", rotary=False, dropout_rate=0.0, dtype=jnp.float32,
    ... )
    >>> options.make_attention(rotary=True).features
    8
  """

  num_heads: int
  model_size: int
  feed_forward_size: int
  score: str
  norm: str
  rotary: bool
  dropout_rate: float
  dtype: DTypeLike

  def make_attention(self, **options) -> MultiHeadAttention:
    """Makes the module of one multi-head attention.

    Args:
      **options: what else `MultiHeadAttention` takes.

    Returns:
      A module that maps [B, T, D] to [B, T, D].
    """
    return MultiHeadAttention(
      num_heads=self.num_heads,
      features=self.model_size,
      score=self.score,
      dtype=self.dtype,
      **options,
    )


class FeedForward(nn.Module):
  """Two dense layers with a rectifier between.

  See "Attention Is All You Need", Vaswani et al., 2017, equation 2
  (https://arxiv.org/abs/1706.03762).

  Attributes:
    options: what all layers share.

  Example:
    >>> options = Options(2, 8, 16, "scaled_dot", "pre", False, 0.0, "float32")
    >>> x = jnp.ones((1, 3, 8))
    >>> def init(rng):
    ...   return FeedForward(options).init_with_output(
    ...     rng, x, deterministic=True
    ...   )
    >>> jax.eval_shape(init, jax.random.key(0))[0].shape
    (1, 3, 8)
  """

  options: Options

  @nn.compact
  def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
    """Maps [..., D] to [..., D]."""
    options = self.options
    hidden = nn.Dense(options.feed_forward_size, dtype=options.dtype)(x)
    hidden = nn.Dropout(options.dropout_rate)(
      nn.relu(hidden), deterministic=deterministic
    )
    return nn.Dense(options.model_size, dtype=options.dtype)(hidden)


class Residual(nn.Module):
  """Adds what a sublayer makes of its input, normalised before or after.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.1
  (https://arxiv.org/abs/1706.03762), for the norm after, and "On Layer
  Normalization in the Transformer Architecture", Xiong et al., 2020
  (https://arxiv.org/abs/2002.04745), for the norm before.

  Attributes:
    options: what all layers share.

  Example:
    >>> options = Options(2, 8, 16, "scaled_dot", "pre", False, 0.0, "float32")
    >>> x = jnp.ones((1, 3, 8))
    >>> residual = Residual(options)
    >>> def init(rng):
    ...   return residual.init_with_output(rng, x, method="enter")
    >>> jax.eval_shape(init, jax.random.key(0))[0].shape
    (1, 3, 8)
  """

  options: Options

  def setup(self):
    """Declares the norm."""
    self.layer_norm = nn.LayerNorm(dtype=self.options.dtype)
    self.dropout = nn.Dropout(self.options.dropout_rate)

  def enter(self, x: jax.Array) -> jax.Array:
    """Returns what the sublayer reads: x [..., D], normed if "pre"."""
    return self.layer_norm(x) if self.options.norm == "pre" else x

  def leave(
    self, x: jax.Array, inner: jax.Array, *, deterministic: bool
  ) -> jax.Array:
    """Joins the sublayer's input and output, [..., D] each."""
    total = x + self.dropout(inner, deterministic=deterministic)
    return self.layer_norm(total) if self.options.norm == "post" else total


class EncoderLayer(nn.Module):
  """Self-attention and a feed-forward network.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.1
  (https://arxiv.org/abs/1706.03762).

  Attributes:
    options: what all layers share.

  Example:
    >>> options = Options(2, 8, 16, "scaled_dot", "pre", False, 0.0, "float32")
    >>> x = jnp.ones((1, 3, 8))
    >>> mask = jnp.ones((1, 1, 1, 3), bool)
    >>> def init(rng):
    ...   return EncoderLayer(options).init_with_output(
    ...     rng, x, mask, deterministic=True
    ...   )
    >>> jax.eval_shape(init, jax.random.key(0))[0].shape
    (1, 3, 8)
  """

  options: Options

  def setup(self):
    """Declares the sublayers."""
    self.self_attention = self.options.make_attention(
      rotary=self.options.rotary
    )
    self.self_residual = Residual(self.options)
    self.feed_forward = FeedForward(self.options)
    self.feed_forward_residual = Residual(self.options)

  def __call__(
    self, x: jax.Array, mask: jax.Array, *, deterministic: bool
  ) -> jax.Array:
    """Maps [B, S, D] to [B, S, D] under a mask [B, 1, 1, S]."""
    inner = self.self_attention(self.self_residual.enter(x), mask=mask)
    x = self.self_residual.leave(x, inner, deterministic=deterministic)
    inner = self.feed_forward(
      self.feed_forward_residual.enter(x), deterministic=deterministic
    )
    return self.feed_forward_residual.leave(
      x, inner, deterministic=deterministic
    )


class DecoderLayer(nn.Module):
  """Causal self-attention, attention to the source, a feed-forward network.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.1
  (https://arxiv.org/abs/1706.03762).

  Attributes:
    options: what all layers share.

  Example:
    >>> options = Options(2, 8, 16, "scaled_dot", "pre", False, 0.0, "float32")
    >>> x = jnp.ones((1, 3, 8))
    >>> memory = KeyValue(jnp.ones((1, 2, 5, 4)), jnp.ones((1, 2, 5, 4)))
    >>> mask = jnp.ones((1, 1, 1, 5), bool)
    >>> def init(rng):
    ...   return DecoderLayer(options).init_with_output(
    ...     rng, x, memory, mask, deterministic=True
    ...   )
    >>> jax.eval_shape(init, jax.random.key(0))[0].shape
    (1, 3, 8)
  """

  options: Options

  def setup(self):
    """Declares the sublayers."""
    self.self_attention = self.options.make_attention(
      rotary=self.options.rotary
    )
    self.self_residual = Residual(self.options)
    self.cross_attention = self.options.make_attention()
    self.cross_residual = Residual(self.options)
    self.feed_forward = FeedForward(self.options)
    self.feed_forward_residual = Residual(self.options)

  def __call__(
    self,
    x: jax.Array,
    memory: KeyValue,
    mask: jax.Array,
    *,
    deterministic: bool,
  ) -> jax.Array:
    """Maps a whole target [B, T, D] to [B, T, D].

    Args:
      x: [B, T, D].
      memory: keys and values [B, H, S, D / H], projected.
      mask: [B, 1, 1, S], False at padding.
      deterministic: whether to leave dropout out.

    Returns:
      [B, T, D].
    """
    inner = self.self_attention(
      self.self_residual.enter(x), mask=masks.causal()
    )
    x = self.self_residual.leave(x, inner, deterministic=deterministic)
    return self._across(x, memory, mask, deterministic=deterministic)[0]

  def step(
    self, x: jax.Array, cache: Cache, memory: KeyValue, mask: jax.Array
  ) -> tuple[jax.Array, Cache, jax.Array]:
    """Maps one token, given the cache of those before it.

    Args:
      x: [B, 1, D].
      cache: the keys and values of the tokens before.
      memory: keys and values [B, H, S, D / H], projected.
      mask: [B, 1, 1, S], False at padding.

    Returns:
      The token [B, 1, D], the longer cache, and where the token looked in the
      source, [B, H, S].
    """
    inner, cache = self.self_attention.decode(
      self.self_residual.enter(x), cache
    )
    x = self.self_residual.leave(x, inner, deterministic=True)
    x, query = self._across(x, memory, mask, deterministic=True)
    weights = self.cross_attention.weights_projected(query, memory, mask=mask)
    return x, cache, weights[..., 0, :]

  def _across(self, x, memory: KeyValue, mask, *, deterministic: bool):
    query = self.cross_residual.enter(x)
    inner = self.cross_attention.attend_projected(query, memory, mask=mask)
    x = self.cross_residual.leave(x, inner, deterministic=deterministic)
    inner = self.feed_forward(
      self.feed_forward_residual.enter(x), deterministic=deterministic
    )
    x = self.feed_forward_residual.leave(x, inner, deterministic=deterministic)
    return x, query


class Transformer(nn.Module):
  """The encoder-decoder of "Attention Is All You Need", Vaswani et al., 2017.

  See https://arxiv.org/abs/1706.03762, section 3.

  Attributes:
    vocabulary_size: V, of source and target.
    model_size: D.
    feed_forward_size: of the hidden layer of the feed-forward networks.
    num_heads: H.
    max_length: the longest source or target, for learned positions.
    encoder_layers: number of layers.
    decoder_layers: number of layers.
    score: of the heads, a name that `attention.modules` knows.
    norm: "pre" or "post".
    positions: "sinusoidal", "learned", "rotary" (in self-attention) or "none".
    tied_embeddings: whether source, target and output share one matrix.
    dropout_rate: on embeddings, sublayers and hidden layers.
    dtype: of the computation; parameters are float32.

  Example:
    >>> model = Transformer(
    ...   vocabulary_size=9, model_size=8, feed_forward_size=16, num_heads=2,
    ...   max_length=8,
    ... )
    >>> source = target = jnp.array([[3, 4, 2, 0]])
    >>> logits, variables = jax.eval_shape(
    ...   model.init_with_output, jax.random.key(0), source, target
    ... )
    >>> logits.shape
    (1, 4, 9)
  """

  vocabulary_size: int
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
  dropout_rate: float = 0.0
  dtype: DTypeLike = jnp.float32

  def setup(self):
    """Declares the parameters."""
    options = Options(
      num_heads=self.num_heads,
      model_size=self.model_size,
      feed_forward_size=self.feed_forward_size,
      score=self.score,
      norm=self.norm,
      rotary=self.positions == "rotary",
      dropout_rate=self.dropout_rate,
      dtype=self.dtype,
    )
    embed = functools.partial(
      nn.Embed,
      self.vocabulary_size,
      self.model_size,
      dtype=self.dtype,
      embedding_init=nn.initializers.normal(self.model_size**-0.5),
    )
    self.embedding = embed()
    if not self.tied_embeddings:
      self.target_embedding = embed()
      self.output = nn.Dense(self.vocabulary_size, dtype=self.dtype)
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
    self.dropout = nn.Dropout(self.dropout_rate)

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
    chex.assert_rank([source, target], 2, custom_message="source, target")
    memory = self._encode(source, deterministic=not train)
    inputs = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
    x = self._embed(inputs, 0, target=True)
    x = self.dropout(x, deterministic=not train)
    for layer, key_value in zip(self.decoder, memory.layers):
      x = layer(x, key_value, memory.mask, deterministic=not train)
    return self._predict(x)

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
    x = self._embed(token[:, None], carry.position, target=True)
    caches, looked = [], []
    for layer, key_value, cache in zip(
      self.decoder, memory.layers, carry.caches
    ):
      x, cache, weights = layer.step(x, cache, key_value, memory.mask)
      caches.append(cache)
      looked.append(weights)
    logits = self._predict(x)[:, 0]
    carry = Carry(tuple(caches), carry.position + 1)
    return carry, logits, jnp.concatenate(looked, axis=1)

  def _encode(self, source: jax.Array, *, deterministic: bool) -> Memory:
    mask = (source != PAD)[:, None, None, :]
    x = self._embed(source, 0, target=False)
    x = self.dropout(x, deterministic=deterministic)
    for layer in self.encoder:
      x = layer(x, mask, deterministic=deterministic)
    if self.norm == "pre":
      x = self.encoder_norm(x)
    return Memory(
      tuple(layer.cross_attention.project(x) for layer in self.decoder), mask
    )

  def _embed(self, tokens: jax.Array, start, *, target: bool) -> jax.Array:
    """Embeds [B, T] tokens whose first one stands at position `start`."""
    untied = target and not self.tied_embeddings
    x = (self.target_embedding if untied else self.embedding)(tokens)
    x = x * jnp.asarray(self.model_size**0.5, x.dtype)
    if self.positions == "learned":
      table = self.places
    elif self.positions == "sinusoidal":
      table = positions.sinusoidal(self.max_length, self.model_size)
    else:
      return x
    places = jax.lax.dynamic_slice_in_dim(table, start, tokens.shape[1])
    return x + places[None].astype(x.dtype)

  def _predict(self, x: jax.Array) -> jax.Array:
    if self.norm == "pre":
      x = self.decoder_norm(x)
    if self.tied_embeddings:
      return self.embedding.attend(x)
    return self.output(x)
