"""Flax Linen modules: they own parameters, pure functions do the rest."""

from attention.attention_module import Attention
from attention.head_projections import KeyValue
from attention.learned_scores import SCORE_NAMES, LearnedScore
from attention.multi_head_module import MultiHeadAttention

__all__ = [
  "SCORE_NAMES",
  "Attention",
  "KeyValue",
  "LearnedScore",
  "MultiHeadAttention",
]
