"""What learns: an RNN encoder-decoder or a Transformer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from experiments.config.sections import (
  AttentionName,
  Natural,
  Positive,
  Rate,
  ScoreName,
  Section,
)


class Seq2SeqConfig(Section):
  """An RNN encoder-decoder; see `models.seq2seq.Seq2Seq` for the fields."""

  name: Literal["seq2seq"]
  embedding_size: Positive
  hidden_size: Positive
  encoder_size: Natural
  cell: Literal["gru", "lstm"]
  encoder_layers: Positive
  decoder_layers: Positive
  bidirectional: bool
  attention: AttentionName
  attention_size: Positive
  order: Literal["bahdanau", "luong"]
  query: Literal["output", "state"]
  readout: Literal["tanh", "linear"]
  input_feeding: bool
  dropout_rate: Rate

  @model_validator(mode="after")
  def _sizes(self):
    encoder_size = self.encoder_size or self.hidden_size
    if self.bidirectional and encoder_size % 2:
      name = "encoder_size" if self.encoder_size else "hidden_size"
      raise ValueError(
        f"{name} must be even: a bidirectional encoder gives half of it"
        " to each direction"
      )
    states = self.decoder_layers * (2 if self.cell == "lstm" else 1)
    asking = self.hidden_size * (states if self.query == "state" else 1)
    if (
      self.attention in ("dot", "scaled_dot", "cosine")
      and asking != encoder_size
    ):
      raise ValueError(
        f"attention {self.attention!r} compares vectors of equal size, but the"
        f" query has {asking} numbers and an encoder state {encoder_size};"
        " make them equal by hidden_size, encoder_size or query 'output', or"
        " use general, additive or concat"
      )
    return self


class TransformerConfig(Section):
  """A Transformer; see `models.transformer.Transformer` for the fields."""

  name: Literal["transformer"]
  model_size: Positive
  feed_forward_size: Positive
  num_heads: Positive
  encoder_layers: Positive
  decoder_layers: Positive
  score: ScoreName
  norm: Literal["pre", "post"]
  positions: Literal["sinusoidal", "learned", "rotary", "alibi", "none"]
  tied_embeddings: bool
  dropout_rate: Rate
  attention_dropout_rate: Rate

  @model_validator(mode="after")
  def _heads(self):
    if self.model_size % self.num_heads:
      raise ValueError(
        f"num_heads {self.num_heads} must divide model_size {self.model_size}"
      )
    if self.positions == "rotary" and (self.model_size // self.num_heads) % 2:
      raise ValueError("rotary positions need an even size of a head")
    return self


ModelConfig = Annotated[
  Seq2SeqConfig | TransformerConfig, Field(discriminator="name")
]
