"""The recurrent encoder: one state for each source token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from experiments.data.batch import PAD
from experiments.models.layers.dropout import Dropout
from experiments.models.rnn import cells


class Encoded(NamedTuple):
  """The encoder's result."""

  states: jax.Array  # [B, S, N], zero at padding
  mask: jax.Array  # [B, S], False at padding
  summary: jax.Array  # [B, N], the last state of each direction


class Encoder(nn.Module):
  """Layers of a GRU or LSTM, in one direction or both.

  A bidirectional encoder gives half of `hidden_size` N to each direction.
  Dropout applies to the embeddings and to every layer's output.
  """

  vocabulary_size: int
  embedding_size: int
  hidden_size: int
  num_layers: int
  cell: str
  bidirectional: bool
  dropout_rate: float
  dtype: DTypeLike

  @nn.compact
  def __call__(self, source: jax.Array, *, train: bool = False) -> Encoded:
    """Encodes source [B, S] token ids, padded with PAD."""
    mask = source != PAD
    dropout = functools.partial(
      Dropout(self.dropout_rate), deterministic=not train
    )
    embed = nn.Embed(
      self.vocabulary_size,
      self.embedding_size,
      dtype=self.dtype,
      name="embedding",
    )
    states = summary = dropout(embed(source))
    for layer in range(self.num_layers):
      states, summary = self._layer(layer, states, mask)
      states = dropout(states)
    return Encoded(states, mask, summary)

  def _layer(self, layer: int, inputs: jax.Array, mask: jax.Array):
    directions = ("forward", "backward")[: 2 if self.bidirectional else 1]
    outputs, finals = [], []
    for direction in directions:
      weights = cells.Recurrent(
        cell=self.cell,
        input_size=inputs.shape[-1],
        hidden_size=self.hidden_size // len(directions),
        dtype=self.dtype,
        name=f"{direction}_{layer}",
      )()
      states, final = cells.run(
        cells.CELLS[self.cell],
        weights,
        inputs,
        mask,
        reverse=direction == "backward",
      )
      outputs.append(states)
      finals.append(final[0])
    return jnp.concatenate(outputs, -1), jnp.concatenate(finals, -1)
