"""The typed form of a config: every field, its type and its range.

`configs/*.py` return a `ConfigDict`; `parse` turns it into these frozen
values, or says in one message what is wrong with which field. Nothing below
`loop.py` sees a `ConfigDict`.
"""

from experiments.config.data import (
  DataConfig,
  DigitRange,
  LengthRange,
  NumbersConfig,
  TaskConfig,
  TextConfig,
  TokenizerConfig,
  TranslationConfig,
)
from experiments.config.model import (
  ModelConfig,
  Seq2SeqConfig,
  TransformerConfig,
)
from experiments.config.parse import Config, parse
from experiments.config.training import (
  EvaluationConfig,
  MeshConfig,
  OptimizerConfig,
  TrainConfig,
)

__all__ = [
  "Config",
  "DataConfig",
  "DigitRange",
  "EvaluationConfig",
  "LengthRange",
  "MeshConfig",
  "ModelConfig",
  "NumbersConfig",
  "OptimizerConfig",
  "Seq2SeqConfig",
  "TaskConfig",
  "TextConfig",
  "TokenizerConfig",
  "TrainConfig",
  "TransformerConfig",
  "TranslationConfig",
  "parse",
]
