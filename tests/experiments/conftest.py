"""A run so small that a test can afford it."""

import pytest

from configs import base


@pytest.fixture
def tiny():
  """A config that trains in a second or two."""
  return make_tiny()


def make_tiny(arg: str = ""):
  """The base config, made small; `arg` as for `base.get_config`."""
  config = base.get_config(arg)
  config.data.symbols = 6
  config.data.max_length = 4
  config.data.splits = {
    "validation": base.split(1, 4, 16),
    "test": base.split(1, 4, 16),
    "longer": base.split(5, 6, 16),
  }
  if config.model.name == "seq2seq":
    config.model.update(embedding_size=8, hidden_size=8, attention_size=8)
  else:
    config.model.update(
      model_size=8,
      feed_forward_size=8,
      num_heads=2,
      encoder_layers=1,
      decoder_layers=1,
    )
  config.train.update(
    steps=12,
    batch_size=16,
    log_every=2,
    eval_every=6,
    checkpoint_every=3,
  )
  return config
