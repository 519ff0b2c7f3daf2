"""The RNN encoder-decoder, with and without attention."""

import chex
import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from attention.modules import Attention
from experiments.config import Seq2SeqConfig
from experiments.data.batch import shift_right
from experiments.models.implementation import of_sequences
from experiments.models.layers.affine import Affine, AffineWeights
from experiments.models.layers.dropout import Dropout
from experiments.models.rnn import cells, decoder, decoder_scan
from experiments.models.rnn.encoder import Encoded, Encoder


class Seq2Seq(nn.Module):
  """An RNN encoder-decoder with any attention, or none.

  See Cho et al., 2014 (https://arxiv.org/abs/1406.1078), without attention;
  Bahdanau et al., 2014 (https://arxiv.org/abs/1409.0473), attention before the
  cell; Luong et al., 2015 (https://arxiv.org/abs/1508.04025), after the cell.
  """

  config: Seq2SeqConfig
  source_vocabulary_size: int
  target_vocabulary_size: int
  max_length: int  # of a source
  dtype: DTypeLike  # of the computation; parameters are float32

  def setup(self):
    """Declares the layers."""
    config, size = self.config, self.config.hidden_size
    self.encoder = Encoder(config, self.source_vocabulary_size, self.dtype)
    self.embedding = nn.Embed(
      self.target_vocabulary_size, config.embedding_size, dtype=self.dtype
    )
    fed = config.context_size * (config.order == "bahdanau")
    fed += config.readout_size * config.input_feeding
    self.cells = [
      cells.Recurrent(
        cell=config.cell,
        input_size=size if layer else config.embedding_size + fed,
        hidden_size=size,
        dtype=self.dtype,
      )
      for layer in range(config.decoder_layers)
    ]
    self.bridge = nn.Dense(config.num_states * size, dtype=self.dtype)
    if config.attention != "none":
      self.attention = Attention(
        name="look",  # in checkpoints
        score=config.attention,
        hidden_size=config.attention_size,
        score_options={
          "max_length": self.max_length,
          "window": config.window,
          "local_score": config.local_score,
        },
        normalizer=config.normalizer,
        dtype=self.dtype,
      )
    if config.readout == "tanh":
      self.combine = AffineWeights(config.context_size + size, size, self.dtype)
    self.output = AffineWeights(
      config.readout_size, self.target_vocabulary_size, self.dtype
    )
    self.dropout = Dropout(config.dropout_rate)

  def __call__(
    self, source: jax.Array, target: jax.Array, *, train: bool = False
  ) -> jax.Array:
    """Returns logits [B, T, V] of target [B, T], given source [B, S]."""
    features, readout = self.features(source, target, train=train)
    return readout(features)

  def features(
    self, source: jax.Array, target: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, Affine]:
    """Returns attentional states [B, T, R] and the affine map to logits."""
    chex.assert_rank([source, target], 2, custom_message="source, target")
    weights = self._weights()
    memory, carry = self._start(weights, self.encoder(source, train=train))
    embeddings = self.embedding(shift_right(target))
    embeddings = self.dropout(embeddings, deterministic=not train)
    attentional = decoder_scan.scan_decoder(
      self.config, weights, memory, carry, embeddings, of_sequences(self)
    )
    attentional = self.dropout(attentional, deterministic=not train)
    return attentional, weights.output

  def start(
    self, source: jax.Array, max_length: int
  ) -> tuple[decoder.Memory, decoder.Carry]:
    """Encodes a source [B, S]; returns memory and carry for `step`."""
    del max_length
    return self._start(self._weights(), self.encoder(source))

  def step(
    self, memory: decoder.Memory, carry: decoder.Carry, token: jax.Array
  ) -> tuple[decoder.Carry, jax.Array, jax.Array]:
    """Returns carry, logits [B, V] and weights [B, 1, S] after a token [B]."""
    weights = self._weights()
    gates = cells.project(weights.cells[0], self.embedding(token))
    following, query = decoder.step(self.config, weights, memory, carry, gates)
    logits = weights.output(following.attentional)
    attention_weights = decoder.attention_weights(
      weights.attention, memory, query, carry.position
    )
    return following, logits, attention_weights

  def _start(self, weights: decoder.DecoderWeights, encoded: Encoded):
    keys = encoded.states
    if weights.attention is not None:
      keys = weights.attention.score.map_key(keys)
    memory = decoder.Memory(
      keys, encoded.states, encoded.mask[:, None, :], encoded.summary
    )
    parts = jnp.split(
      jnp.tanh(self.bridge(encoded.summary)), self.config.num_states, -1
    )
    each = cells.CELLS[self.config.cell].num_parts
    states = tuple(
      tuple(parts[i : i + each]) for i in range(0, len(parts), each)
    )
    attentional = jnp.zeros(
      (encoded.summary.shape[0], self.config.readout_size), self.dtype
    )
    return memory, decoder.Carry(states, attentional, jnp.zeros((), jnp.int32))

  def _weights(self) -> decoder.DecoderWeights:
    config, bound = self.config, None
    if config.attention != "none":
      bound = decoder.BoundAttention(
        self.attention.bound_score(config.query_size, config.context_size),
        self.attention.bound_normalizer(),
      )
    combine = self.combine() if config.readout == "tanh" else None
    first, *others = (cell() for cell in self.cells)
    embedded, fed = jnp.split(first.input, [config.embedding_size])
    return decoder.DecoderWeights(
      cells=(first._replace(input=embedded), *others),
      fed=fed,
      attention=bound,
      combine=combine,
      output=self.output(),
    )
