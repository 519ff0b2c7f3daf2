"""Figures of attention weights and metrics, and the fonts for their labels."""

from experiments.visualization.plots import (
  AttentionPanel,
  save_accuracy_by_length,
  save_attention_figure,
  save_attention_weights,
)

__all__ = [
  "AttentionPanel",
  "save_accuracy_by_length",
  "save_attention_figure",
  "save_attention_weights",
]
