"""Encoder-decoder models: RNN and Transformer."""

from flax import linen as nn

from experiments.config import ModelConfig, Seq2SeqConfig


def make_model(
  config: ModelConfig,
  *,
  source_vocabulary_size: int,
  target_vocabulary_size: int,
  shared_vocabulary: bool,  # whether source and target have the same token ids
  max_length: int,  # of a source or target, EOS included
  dtype: str,  # of the computation
) -> nn.Module:
  """Returns the model of a config.

  It has `__call__(source, target, train=)`, which returns logits; `features`,
  the input of the last layer; `start` and `step` for decoding.

  Example:
    >>> from experiments.config import TransformerConfig
    >>> model = make_model(
    ...   TransformerConfig(),
    ...   source_vocabulary_size=9, target_vocabulary_size=9,
    ...   shared_vocabulary=True, max_length=8, dtype="float32",
    ... )
    >>> model.config.num_heads
    4
  """
  sizes = (source_vocabulary_size, target_vocabulary_size)
  # Only the module that is needed is imported: a run starts sooner.
  if isinstance(config, Seq2SeqConfig):
    from experiments.models.rnn.seq2seq import Seq2Seq

    return Seq2Seq(config, *sizes, max_length, dtype)
  from experiments.models.transformer.model import Transformer

  return Transformer(config, *sizes, shared_vocabulary, max_length, dtype)
