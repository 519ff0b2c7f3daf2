"""Reverses a sequence of 1 to 25 symbols out of 50.

The task needs attention: the first target symbols are the last ones that the
encoder has read, but the last target symbols were read many steps before.
A fixed context vector fails on long sequences; attention weights form an
anti-diagonal.

Source: the reverse task of JoeyNMT's tutorial (Kreutzer et al., 2019,
https://arxiv.org/abs/1907.12484), which reports BLEU 95.2 on lengths up to 30.

    python -m experiments.train --config=configs/reverse.py
    python -m experiments.train --config=configs/reverse.py:none
    python -m experiments.train --config=configs/reverse.py:transformer

Times and results of these three commands, in this order:

Time: 53 s, 65 s and 172 s on 2 CPU cores, from the command to the result. The
first command takes 26 s on a newer machine.
Result: sequence accuracy on unseen data, lengths 1 to 25: 100%, 46% and 99.4%;
lengths 26 to 30: 67%, 0% and 36%. BLEU for lengths up to 30: 98.9, 35.8 and
98.7. Results for lengths 26 to 30 vary between seeds: with attention, the mean
of five seeds is 67.2%, and 83.3% after 2,500 steps (docs/results.md).
"""

from ml_collections import ConfigDict

from configs import base


def get_config(arg: str = "") -> ConfigDict:
  config = base.get_config(arg)
  config.data.name = "reverse"
  if arg not in ("none", "transformer"):
    config.train.steps = 1000  # learns lengths 1 to 25
  return config
