"""Encoder-decoder models: RNN and Transformer."""

import dataclasses
from typing import Any

from flax import linen as nn

from experiments.config import ModelConfig, Seq2SeqConfig


def make_model(
  config: ModelConfig,
  *,
  source_vocabulary_size: int,
  target_vocabulary_size: int,
  shared_vocabulary: bool,
  max_length: int,
  dtype: str,
) -> nn.Module:
  """Returns the model of a config.

  Args:
    config: `config.model`.
    source_vocabulary_size: number of source tokens.
    target_vocabulary_size: V.
    shared_vocabulary: whether source and target have the same token ids.
    max_length: the longest source or target, EOS included.
    dtype: of the computation.

  Returns:
    A module with `__call__(source, target, train=)`, which returns logits;
    `features`, the input of the last layer; `start` and `step` for decoding.

  Example:
    >>> from experiments.config import TransformerConfig
    >>> model = make_model(
    ...   TransformerConfig(),
    ...   source_vocabulary_size=9, target_vocabulary_size=9,
    ...   shared_vocabulary=True, max_length=8, dtype="float32",
    ... )
    >>> model.num_heads
    4
  """
  fields = config.model_dump(exclude={"name"})
  sizes: dict[str, Any] = {
    "source_vocabulary_size": source_vocabulary_size,
    "target_vocabulary_size": target_vocabulary_size,
  }
  if isinstance(config, Seq2SeqConfig):
    from experiments.models.rnn.decoder import Wiring
    from experiments.models.rnn.seq2seq import Seq2Seq

    wires = {field.name for field in dataclasses.fields(Wiring)}
    wiring = Wiring(**{name: fields.pop(name) for name in wires})
    return Seq2Seq(**sizes, **fields, wiring=wiring, dtype=dtype)
  from experiments.models.transformer.model import Transformer

  return Transformer(
    **sizes,
    **fields,
    shared_vocabulary=shared_vocabulary,
    max_length=max_length,
    dtype=dtype,
  )
