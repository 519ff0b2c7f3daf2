"""What all layers of a Transformer share, and the attention that they use."""

import dataclasses

from jax.typing import DTypeLike

from attention import biases
from attention.arrays.axes import round_up
from attention.biases import Bias
from attention.implementations import Implementation
from attention.modules import (
  POSITIONAL_SCORE_NAMES,
  MeshAxes,
  MultiHeadAttention,
)
from attention.positions import RotaryOptions
from experiments.config import TransformerConfig
from experiments.models.layers.dropout import Dropout


@dataclasses.dataclass(frozen=True)
class Options:
  """What all layers of a Transformer share."""

  config: TransformerConfig
  dtype: DTypeLike  # of the computation
  mesh_axes: MeshAxes  # shard rows, heads and tokens
  max_length: int  # of a source or target
  implementation: Implementation | None = None  # of attention

  def make_attention(
    self, *, is_self: bool, is_causal: bool = False
  ) -> MultiHeadAttention:
    """Returns the module of self-attention or cross-attention."""
    score, wrapper = self.config.score_name, self.config.score_wrapper
    if score in POSITIONAL_SCORE_NAMES and not is_self and score != "local_p":
      score = "scaled_dot"  # source and target positions do not correspond
    rotary = is_self and self.config.positions == "rotary"
    # Sequences are padded for the devices of a ring.
    longest = round_up(self.max_length, self.mesh_axes.length_multiple)
    return MultiHeadAttention(
      num_heads=self.config.num_heads,
      features=self.config.model_size,
      score=score,
      score_options={
        "max_distance": self.config.max_distance,
        "max_length": self.max_length,
        "window": self.config.window,
        "causal": is_causal,
        "wrapper": None if wrapper == "none" else wrapper,
        "cap": self.config.soft_cap,
      },
      normalizer=self.config.normalizer,
      dropout_rate=self.config.attention_dropout_rate,
      dtype=self.dtype,
      mesh_axes=self.mesh_axes,
      implementation=self.implementation,
      rotary=rotary and RotaryOptions(max_length=longest),
    )

  @property
  def bias(self) -> Bias | None:
    """The bias of self-attention, for ALiBi."""
    alibi = self.config.positions == "alibi"
    return biases.alibi(self.config.num_heads) if alibi else None

  def make_dropout(self) -> Dropout:
    """Returns the dropout of arrays [B, T, D]."""
    return Dropout(self.config.dropout_rate, self.mesh_axes.positions)
