"""The layers of a Transformer: attention, feed-forward, residual, norm.

See "Attention Is All You Need", Vaswani et al., 2017, section 3
(https://arxiv.org/abs/1706.03762).

Axes: B batch, S source, T target, D model, H heads.
"""

import dataclasses

import jax
from flax import linen as nn
from jax.typing import DTypeLike

from attention import biases, masks
from attention.biases import Bias
from attention.cache import Cache
from attention.modules import KeyValue, MeshAxes, MultiHeadAttention
from experiments.distributed.sharding import ALONE, constrain
from experiments.models.layers.dropout import Dropout


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
    positions: how self-attention knows them: "rotary" rotates queries and keys
      (Su et al., 2021, https://arxiv.org/abs/2104.09864), "alibi" lowers scores
      by distance (Press et al., 2021, https://arxiv.org/abs/2108.12409); others
      leave it to the embeddings.
    dropout_rate: on sublayers and hidden layers.
    attention_dropout_rate: on attention weights.
    dtype: of the computation.
    mesh_axes: of the mesh, which share heads and tokens.

  Example:
    >>> import jax.numpy as jnp
    >>> options = Options(
    ...   num_heads=2, model_size=8, feed_forward_size=16, score="scaled_dot",
    ...   norm="pre", positions="alibi", dropout_rate=0.0,
    ...   attention_dropout_rate=0.0, dtype=jnp.float32,
    ... )
    >>> options.make_attention().features, options.bias
    (8, Alibi(num_heads=2))
  """

  num_heads: int
  model_size: int
  feed_forward_size: int
  score: str
  norm: str
  positions: str
  dropout_rate: float
  attention_dropout_rate: float
  dtype: DTypeLike
  mesh_axes: MeshAxes = ALONE

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
      dropout_rate=self.attention_dropout_rate,
      dtype=self.dtype,
      mesh_axes=self.mesh_axes,
      **options,
    )

  @property
  def bias(self) -> Bias | None:
    """What positions add to the scores of self-attention."""
    return biases.alibi(self.num_heads) if self.positions == "alibi" else None

  def make_dropout(self) -> Dropout:
    """Makes the module that drops numbers of [B, T, D]."""
    return Dropout(self.dropout_rate, self.mesh_axes.positions)


class FeedForward(nn.Module):
  """Two dense layers with a rectifier between.

  See "Attention Is All You Need", Vaswani et al., 2017, equation 2
  (https://arxiv.org/abs/1706.03762).

  Attributes:
    options: what all layers share.

  Example:
    >>> options = Options(2, 8, 16, "dot", "pre", "none", 0, 0, "float32")
    >>> import jax.numpy as jnp
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
    hidden = options.make_dropout()(
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
    >>> options = Options(2, 8, 16, "dot", "pre", "none", 0, 0, "float32")
    >>> import jax.numpy as jnp
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
    self.dropout = self.options.make_dropout()

  def enter(self, x: jax.Array) -> jax.Array:
    """Returns what the sublayer reads: x [..., D], normed if "pre"."""
    return self.layer_norm(x) if self.options.norm == "pre" else x

  def leave(
    self, x: jax.Array, inner: jax.Array, *, deterministic: bool
  ) -> jax.Array:
    """Joins the sublayer's input and output, [..., D] each."""
    total = x + self.dropout(inner, deterministic=deterministic)
    total = constrain(total, "rows", "tokens", "features")
    return self.layer_norm(total) if self.options.norm == "post" else total


class EncoderLayer(nn.Module):
  """Self-attention and a feed-forward network.

  See "Attention Is All You Need", Vaswani et al., 2017, section 3.1
  (https://arxiv.org/abs/1706.03762).

  Attributes:
    options: what all layers share.

  Example:
    >>> options = Options(2, 8, 16, "dot", "pre", "none", 0, 0, "float32")
    >>> import jax.numpy as jnp
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
      rotary=self.options.positions == "rotary"
    )
    self.self_residual = Residual(self.options)
    self.feed_forward = FeedForward(self.options)
    self.feed_forward_residual = Residual(self.options)

  def __call__(
    self, x: jax.Array, mask: jax.Array, *, deterministic: bool
  ) -> jax.Array:
    """Maps [B, S, D] to [B, S, D] under a mask [B, 1, 1, S]."""
    inner = self.self_attention(
      self.self_residual.enter(x),
      mask=mask,
      bias=self.options.bias,
      deterministic=deterministic,
    )
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
    >>> options = Options(2, 8, 16, "dot", "pre", "none", 0, 0, "float32")
    >>> import jax.numpy as jnp
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
      rotary=self.options.positions == "rotary"
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
      self.self_residual.enter(x),
      mask=masks.causal(),
      bias=self.options.bias,
      deterministic=deterministic,
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
      self.self_residual.enter(x), cache, bias=self.options.bias
    )
    x = self.self_residual.leave(x, inner, deterministic=True)
    x, query = self._across(x, memory, mask, deterministic=True)
    weights = self.cross_attention.weights_projected(query, memory, mask=mask)
    return x, cache, weights[..., 0, :]

  def _across(self, x, memory: KeyValue, mask, *, deterministic: bool):
    query = self.cross_residual.enter(x)
    inner = self.cross_attention.attend_projected(
      query, memory, mask=mask, deterministic=deterministic
    )
    x = self.cross_residual.leave(x, inner, deterministic=deterministic)
    inner = self.feed_forward(
      self.feed_forward_residual.enter(x), deterministic=deterministic
    )
    x = self.feed_forward_residual.leave(x, inner, deterministic=deterministic)
    return x, query
