"""Look a key up in a list of key-value pairs."""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
  config = base.get_config(arg)
  config.data.name = "lookup"
  return config
