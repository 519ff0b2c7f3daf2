"""Copies a sequence of 1 to 25 symbols out of 50.

Source: the copy task of "Neural Turing Machines", Graves et al., 2014, section
4.1 (https://arxiv.org/abs/1410.5401), with symbols instead of bits.

    python -m experiments.train --config=configs/copy.py

Time: 92 s on 2 CPU cores, from the command to the result.
Result: sequence accuracy on unseen data: 100% for lengths 1 to 25, 78.6% for
lengths 26 to 30.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
  config = base.get_config(arg)
  config.data.name = "copy"
  return config
