"""Look a key up in a list of key-value pairs: attention as a dictionary.

A source is `k1 v1 ... kn vn q`, 1 to 25 pairs of 50 keys and 50 values; the
target is the value of q. The encoder binds each value to the key before it,
and the decoder has to find the key that it was asked for.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
  config = base.get_config(arg or "general")
  config.data.name = "lookup"
  config.train.batch_size = 64
  config.train.steps = 1200
  config.train.eval_every = config.train.checkpoint_every = 300
  return config
