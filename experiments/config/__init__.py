"""The typed config: the type, range and default of every field."""

from experiments.config.data import (
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
