"""The default config, which the files in `configs/` change.

Every default is declared in `experiments/config/`, with its type, range and
description; the functions below return sections of a config.
"""

import typing

from ml_collections import ConfigDict

from experiments import config as typed
from experiments.config.sections import AttentionName, Section
from experiments.errors import UserError, suggestion

ARGUMENTS = (*typing.get_args(AttentionName), "transformer")


def get_config(arg: str = "") -> ConfigDict:
  """Returns the default config; `arg` is a score, "none" or "transformer"."""
  arg = arg or "additive"
  if arg not in ARGUMENTS:
    raise UserError(
      f"unknown argument {arg!r} after the colon; known: {', '.join(ARGUMENTS)}"
      f"{suggestion(arg, ARGUMENTS)}"
    )
  transformer = arg == "transformer"
  config = section(
    typed.Config(
      data=typed.TaskConfig(),
      model=typed.TransformerConfig() if transformer else typed.Seq2SeqConfig(),
      optimizer=typed.OptimizerConfig(),
      train=typed.TrainConfig(),
      evaluation=typed.EvaluationConfig(),
      mesh=typed.MeshConfig(),
    )
  )
  if transformer:
    config.optimizer.learning_rate = 2e-3
  else:
    config.model.attention = arg
  return config


def section(values: Section) -> ConfigDict:
  """Returns a typed section as a ConfigDict, all of its fields included."""
  return ConfigDict(values.model_dump())


def text() -> ConfigDict:
  """Parallel text in files."""
  return section(typed.TextConfig())


def numbers() -> ConfigDict:
  """Spelt numbers, from English words to Korean characters."""
  config = section(typed.NumbersConfig())
  config.update(
    target="ko",
    source_tokenizer=tokenizer("words", 1000),
    target_tokenizer=tokenizer("characters", 1000),
    joint_vocabulary=False,
    max_length=96,
    num_shapes=6,
  )
  return config


def split(min_length: int, max_length: int, num_examples: int) -> dict:
  """An evaluation set of a synthetic task."""
  return typed.LengthRange(
    min_length=min_length, max_length=max_length, num_examples=num_examples
  ).model_dump()


def digits(min_digits: int, max_digits: int, num_examples: int) -> dict:
  """A set of numbers."""
  return typed.DigitRange(
    min_digits=min_digits, max_digits=max_digits, num_examples=num_examples
  ).model_dump()


def tokenizer(kind: str, vocabulary_size: int) -> dict:
  """A tokenizer: "unigram", "bpe", "words" or "characters"."""
  fields = {"kind": kind, "vocabulary_size": vocabulary_size}
  return typed.TokenizerConfig().model_dump() | fields
