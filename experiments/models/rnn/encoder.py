"""The recurrent encoder: one state for each source token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from experiments.config import Seq2SeqConfig
from experiments.data.batch import PAD
from experiments.models.layers.dropout import Dropout
from experiments.models.rnn import cells


class Encoded(NamedTuple):
  """The encoder's result."""

  states: jax.Array  # [B, S, N], zero at padding
  mask: jax.Array  # [B, S], False at padding
  summary: jax.Array  # [B, N], the last state of each direction


class Encoder(nn.Module):
  """Layers of a GRU or LSTM; two directions have half of the features each."""

  config: Seq2SeqConfig
  vocabulary_size: int
  dtype: DTypeLike

  @nn.compact
  def __call__(self, source: jax.Array, *, train: bool = False) -> Encoded:
    """Encodes source [B, S] token ids, padded with PAD."""
    mask = source != PAD
    dropout = functools.partial(
      Dropout(self.config.dropout_rate), deterministic=not train
    )
    embed = nn.Embed(
      self.vocabulary_size,
      self.config.embedding_size,
      dtype=self.dtype,
      name="embedding",
    )
    states = summary = dropout(embed(source))
    for layer in range(self.config.encoder_layers):
      states, summary = self._layer(layer, states, mask)
      states = dropout(states)
    return Encoded(states, mask, summary)

  def _layer(self, layer: int, inputs: jax.Array, mask: jax.Array):
    both = ("forward", "backward")
    directions = both if self.config.bidirectional else both[:1]
    outputs, finals = [], []
    for direction in directions:
      weights = cells.Recurrent(
        cell=self.config.cell,
        input_size=inputs.shape[-1],
        hidden_size=self.config.context_size // len(directions),
        dtype=self.dtype,
        name=f"{direction}_{layer}",
      )()
      states, final = cells.run(
        cells.CELLS[self.config.cell],
        weights,
        inputs,
        mask,
        reverse=direction == "backward",
      )
      outputs.append(states)
      finals.append(final[0])
    return jnp.concatenate(outputs, -1), jnp.concatenate(finals, -1)
