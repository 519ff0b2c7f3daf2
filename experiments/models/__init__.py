"""Models that turn a source into a target."""

from flax import linen as nn

from experiments.schema import ModelConfig, Seq2SeqConfig


def make_model(
  config: ModelConfig, *, vocabulary_size: int, max_length: int, dtype: str
) -> nn.Module:
  """Makes the model of a config.

  Args:
    config: `config.model`.
    vocabulary_size: V, of source and target.
    max_length: the longest source or target, EOS included.
    dtype: of the computation.

  Returns:
    A module with `__call__(source, target, train=)`, and `start` and `step`
    for decoding.

  Example:
    >>> from configs import base
    >>> from experiments.schema import parse
    >>> model = make_model(
    ...   parse(base.get_config("transformer").to_dict()).model,
    ...   vocabulary_size=9, max_length=8, dtype="float32",
    ... )
    >>> model.num_heads
    4
  """
  if isinstance(config, Seq2SeqConfig):
    from experiments.models.decoder import Wiring
    from experiments.models.seq2seq import Seq2Seq

    return Seq2Seq(
      source_vocabulary_size=vocabulary_size,
      target_vocabulary_size=vocabulary_size,
      embedding_size=config.embedding_size,
      hidden_size=config.hidden_size,
      wiring=Wiring(
        cell=config.cell,
        order=config.order,
        query=config.query,
        readout=config.readout,
        input_feeding=config.input_feeding,
      ),
      encoder_layers=config.encoder_layers,
      decoder_layers=config.decoder_layers,
      bidirectional=config.bidirectional,
      attention=config.attention,
      attention_size=config.attention_size,
      dropout_rate=config.dropout_rate,
      dtype=dtype,
    )
  from experiments.models.transformer import Transformer

  return Transformer(
    vocabulary_size=vocabulary_size,
    max_length=max_length,
    dtype=dtype,
    **config.model_dump(exclude={"name"}),
  )
