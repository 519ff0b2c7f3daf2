"""Flax Linen modules: they own parameters, pure functions do the rest."""

from attention.modules.head_projections import KeyValue
from attention.modules.learned_scores import SCORE_NAMES, LearnedScore
from attention.modules.mesh_axes import MeshAxes
from attention.modules.multi_head import MultiHeadAttention
from attention.modules.single_head import Attention

__all__ = [
  "SCORE_NAMES",
  "Attention",
  "KeyValue",
  "LearnedScore",
  "MeshAxes",
  "MultiHeadAttention",
]
