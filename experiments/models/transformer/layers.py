"""The layers of a Transformer (Vaswani et al., 2017, arXiv:1706.03762)."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from attention import masks
from attention.biases import Bias
from attention.cache import Cache
from attention.modules import KeyValue
from experiments.distributed.sharding import constrain
from experiments.models.transformer import beam_cache
from experiments.models.transformer.beam_cache import BeamCache, Slots
from experiments.models.transformer.forget_gate import ForgetGate, decay
from experiments.models.transformer.options import Options


class FeedForward(nn.Module):
  """Two dense layers with a rectifier between them (Vaswani et al., 3.3)."""

  options: Options

  @nn.compact
  def __call__(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
    """Maps [..., D] to [..., D]."""
    config, dtype = self.options.config, self.options.dtype
    hidden = nn.relu(nn.Dense(config.feed_forward_size, dtype=dtype)(x))
    hidden = self.options.make_dropout()(hidden, deterministic=deterministic)
    return nn.Dense(config.model_size, dtype=dtype)(hidden)


class Residual(nn.Module):
  """Adds a sublayer's output to its input, with the norm before or after."""

  options: Options

  def setup(self):
    """Declares the layers."""
    self.layer_norm = nn.LayerNorm(dtype=self.options.dtype)
    self.dropout = self.options.make_dropout()

  def inputs(self, x: jax.Array) -> jax.Array:
    """Returns the sublayer's input [..., D], normalised if "pre"."""
    # See Xiong et al., 2020 (https://arxiv.org/abs/2002.04745).
    return self.layer_norm(x) if self.options.config.norm == "pre" else x

  def add(
    self, x: jax.Array, inner: jax.Array, *, deterministic: bool
  ) -> jax.Array:
    """Adds the sublayer's input and output [..., D]."""
    total = x + self.dropout(inner, deterministic=deterministic)
    total = constrain(total)
    after = self.options.config.norm == "post"
    return self.layer_norm(total) if after else total


class _Layer(nn.Module):
  """The sublayers that encoder and decoder layers share."""

  options: Options
  is_causal: ClassVar[bool]

  def setup(self):
    """Declares the layers."""
    self.self_attention = self.options.make_attention(
      is_self=True, is_causal=self.is_causal
    )
    self.self_residual = Residual(self.options)
    self.feed_forward = FeedForward(self.options)
    self.feed_forward_residual = Residual(self.options)

  def _self_attend(
    self, x: jax.Array, mask, key_lengths=None, *, deterministic: bool
  ):
    inputs = self.self_residual.inputs(x)
    keys = {
      "mask": mask,
      "bias": self._bias(inputs),
      "key_lengths": key_lengths,
    }
    inner = self.self_attention(inputs, **keys, deterministic=deterministic)
    self._sow_weights(
      "self_attention_weights",
      lambda: self.self_attention.weights(inputs, **keys),
    )
    return self.self_residual.add(x, inner, deterministic=deterministic)

  def _sow_weights(self, name: str, weights: Callable[[], jax.Array]) -> None:
    """Stores weights [B, H, T, S] if "intermediates" is mutable."""
    if self.is_mutable_collection("intermediates"):
      self.sow("intermediates", name, weights())

  def _bias(self, inputs: jax.Array) -> Bias | None:
    """Returns the bias of self-attention to inputs [B, T, D]."""
    del inputs
    return self.options.bias

  def _feed_forward(self, x: jax.Array, *, deterministic: bool) -> jax.Array:
    inner = self.feed_forward(
      self.feed_forward_residual.inputs(x), deterministic=deterministic
    )
    return self.feed_forward_residual.add(x, inner, deterministic=deterministic)


class EncoderLayer(_Layer):
  """Self-attention and a feed-forward network (Vaswani et al., 3.1)."""

  is_causal = False

  def __call__(
    self, x: jax.Array, mask: jax.Array, *, deterministic: bool
  ) -> jax.Array:
    """Maps [B, S, D] to [B, S, D] under a mask [B, 1, 1, S]."""
    x = self._self_attend(x, mask, _lengths(mask), deterministic=deterministic)
    return self._feed_forward(x, deterministic=deterministic)


class DecoderCache(NamedTuple):
  """What self-attention of a decoder layer stores of earlier tokens."""

  tokens: Cache
  log_gates: jax.Array | None  # [B, H, max_length], see ForgetGate


class DecoderLayer(_Layer):
  """Causal self-attention, cross-attention and a feed-forward network."""

  is_causal = True

  def setup(self):
    """Declares the layers."""
    super().setup()
    self.cross_attention = self.options.make_attention(is_self=False)
    self.cross_residual = Residual(self.options)
    if self.options.config.has_forget_gates:
      self.forget_gate = ForgetGate(
        self.options.config.num_heads, self.options.dtype
      )

  def __call__(
    self,
    x: jax.Array,
    encoded: jax.Array,  # [B, S, D]
    mask: jax.Array,  # [B, 1, 1, S]
    *,
    deterministic: bool,
  ) -> jax.Array:
    """Maps a whole target [B, T, D] to [B, T, D]."""
    memory = self.cross_attention.project(encoded)
    x = self._self_attend(x, masks.causal(), deterministic=deterministic)
    x, query = self._across(x, memory, mask, deterministic=deterministic)
    self._sow_weights(
      "cross_attention_weights",
      lambda: self._cross_weights(query, memory, mask),
    )
    return x

  def init_cache(self, batch_size: int, max_length: int) -> DecoderCache:
    """Returns an empty cache of `max_length` tokens for `step`."""
    tokens = self.self_attention.init_cache(
      (batch_size,), max_length, self.options.dtype
    )
    log_gates, config = None, self.options.config
    if config.has_forget_gates:
      log_gates = jnp.zeros((batch_size, config.num_heads, max_length))
    return DecoderCache(tokens, log_gates)

  def step(
    self, x: jax.Array, cache: DecoderCache, memory: KeyValue, mask: jax.Array
  ) -> tuple[jax.Array, DecoderCache, jax.Array]:
    """Maps one token [B, 1, D]; also returns cache and weights [B, H, S]."""
    inputs, (tokens, log_gates) = self.self_residual.inputs(x), cache
    bias = self.options.bias
    if log_gates is not None:
      log_gates = jax.lax.dynamic_update_slice_in_dim(
        log_gates, self.forget_gate(inputs), tokens.length, axis=-1
      )
      bias = _sum(bias, decay(log_gates))
    inner, tokens = self.self_attention.decode(inputs, tokens, bias=bias)
    cache = DecoderCache(tokens, log_gates)
    x = self.self_residual.add(x, inner, deterministic=True)
    x, query = self._across(x, memory, mask, deterministic=True)
    weights = self._cross_weights(query, memory, mask)
    return x, cache, weights[..., 0, :]

  def beam_step(
    self,
    x: jax.Array,
    cache: BeamCache,
    slots: Slots,
    memory: KeyValue,
    mask: jax.Array,
  ) -> tuple[jax.Array, BeamCache]:
    """Maps one token of each hypothesis, [B, K, D]; also returns the cache."""
    inputs = self.self_residual.inputs(x)
    inner, cache = beam_cache.decode(self.self_attention, inputs, cache, slots)
    x = self.self_residual.add(x, inner, deterministic=True)
    return self._across(x, memory, mask, deterministic=True)[0], cache

  def _bias(self, inputs):
    bias = self.options.bias
    if not self.options.config.has_forget_gates:
      return bias
    return _sum(bias, decay(self.forget_gate(inputs)))

  def _across(self, x, memory: KeyValue, mask, *, deterministic: bool):
    query = self.cross_residual.inputs(x)
    inner = self.cross_attention.attend_projected(
      query,
      memory,
      mask=mask,
      key_lengths=_lengths(mask),
      deterministic=deterministic,
    )
    x = self.cross_residual.add(x, inner, deterministic=deterministic)
    return self._feed_forward(x, deterministic=deterministic), query

  def _cross_weights(self, query, memory: KeyValue, mask) -> jax.Array:
    """The weights [B, H, T, S] of cross-attention."""
    return self.cross_attention.weights_projected(
      query, memory, mask=mask, key_lengths=_lengths(mask)
    )


def _lengths(mask: jax.Array) -> jax.Array:
  """The lengths [B] of sources without padding, from a mask [B, 1, 1, S]."""
  return jnp.sum(mask, axis=-1)[:, 0, 0]


def _sum(bias: Bias | None, other: Bias) -> Bias:
  return other if bias is None else bias + other
