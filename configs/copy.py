"""Copy a sequence of symbols."""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
  config = base.get_config(arg)
  config.data.name = "copy"
  return config
