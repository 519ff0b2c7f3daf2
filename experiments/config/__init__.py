"""The typed config: each field's type, range, default and description.

`configs/base.py` is made from these types. `parse` converts a `ConfigDict` to
them, or reports every invalid field in one message.
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
from experiments.config.parse import Config, parse, parse_stored
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
  "parse_stored",
]
