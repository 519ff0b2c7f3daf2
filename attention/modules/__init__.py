"""Flax Linen modules that own parameters and call the pure functions."""

from attention.modules.learned_normalizers import (
  NORMALIZER_NAMES,
  LearnedNormalizer,
)
from attention.modules.learned_scores import (
  POSITIONAL_SCORE_NAMES,
  SCORE_NAMES,
  SCORE_WRAPPER_NAMES,
  LearnedScore,
)
from attention.modules.multi_head import MultiHeadAttention
from attention.modules.single_head import Attention
from attention.multi_head.grouped_query import KeyValue
from attention.multi_head.mesh_axes import MeshAxes

__all__ = [
  "NORMALIZER_NAMES",
  "POSITIONAL_SCORE_NAMES",
  "SCORE_NAMES",
  "SCORE_WRAPPER_NAMES",
  "Attention",
  "KeyValue",
  "LearnedNormalizer",
  "LearnedScore",
  "MeshAxes",
  "MultiHeadAttention",
]
