"""Config of the model: an RNN encoder-decoder or a Transformer."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from attention.names import NormalizerName, ScoreWrapperName
from experiments.config.sections import (
  CHANGEABLE,
  AboveZero,
  AttentionName,
  ImplementationName,
  Natural,
  Rate,
  Section,
  Size,
  TransformerScoreName,
)


class Seq2SeqConfig(Section):
  """An RNN encoder-decoder."""

  name: Literal["seq2seq"] = "seq2seq"
  embedding_size: Size = 64
  """Features of a source or target embedding."""
  hidden_size: Size = 128
  """Features of a decoder state."""
  encoder_size: Natural = 0
  """Features of an encoder state, both directions together; 0: hidden_size."""
  cell: Literal["gru", "lstm"] = "gru"
  """Type of the recurrent cells."""
  encoder_layers: Size = 1
  """Layers of the encoder."""
  decoder_layers: Size = 1
  """Layers of the decoder."""
  bidirectional: bool = True
  """Whether the encoder also reads the source backwards."""
  attention: AttentionName = "additive"
  """Score of the attention; "none" uses the encoder's last state."""
  normalizer: NormalizerName = "softmax"
  """Function from a query's scores to its attention weights."""
  attention_size: Size = 64
  """Hidden size of the additive and concat scores, and of local_p."""
  window: Size = 10
  """Largest distance of a key from the center of local_m and local_p."""
  local_score: Literal["general", "dot"] = "general"
  """Score within the window of local_m and local_p."""
  order: Literal["bahdanau", "luong"] = "bahdanau"
  """Attend before the decoder's cell (bahdanau) or after it (luong)."""
  query: Literal["output", "state"] = "output"
  """The query: the top layer's output, or the states of all layers."""
  readout: Literal["tanh", "linear"] = "tanh"
  """Input of the logits: tanh(W [context; output]), or [context; output]."""
  input_feeding: bool = False
  """Whether the decoder's cell also reads the previous readout."""
  dropout_rate: Rate = 0.0
  """Dropout of embeddings, encoder states and readouts."""
  attention_implementation: Annotated[ImplementationName, CHANGEABLE] = "auto"
  """Implementation of attention, if all steps of a target attend at once.

  They do with order luong without input_feeding. A single step always has the
  implementation that the library chooses.
  """

  @property
  def context_size(self) -> int:
    """Features of an encoder state, and of a context vector."""
    return self.encoder_size or self.hidden_size

  @property
  def num_states(self) -> int:
    """Number of arrays in the states of all the decoder's layers."""
    return self.decoder_layers * (2 if self.cell == "lstm" else 1)

  @property
  def query_size(self) -> int:
    """Features of a query."""
    return self.hidden_size * (self.num_states if self.query == "state" else 1)

  @property
  def readout_size(self) -> int:
    """Features of the input of the logits."""
    both = self.readout == "linear"
    return self.hidden_size + (self.context_size if both else 0)

  @model_validator(mode="after")
  def _sizes(self):
    if self.bidirectional and self.context_size % 2:
      name = "encoder_size" if self.encoder_size else "hidden_size"
      raise ValueError(
        f"{name} must be even: each direction of a bidirectional encoder has"
        " half of the features"
      )
    is_local = self.attention in ("local_m", "local_p")
    score = self.local_score if is_local else self.attention
    if (
      score in ("dot", "scaled_dot", "cosine")
      and self.query_size != self.context_size
    ):
      raise ValueError(
        f"the score {score!r} needs queries and keys of equal size,"
        f" but the query has {self.query_size} features and an encoder state"
        f" has {self.context_size}; change hidden_size, encoder_size or query,"
        " or use general"
      )
    return self

  @model_validator(mode="after")
  def _normalizer(self):
    if self.attention == "none" and self.normalizer != "softmax":
      raise ValueError(
        f"normalizer {self.normalizer!r} has no effect with attention 'none';"
        " use 'softmax', or choose a score as the attention"
      )
    if self.attention == "local_p":
      _check_is_softmax("attention", self.normalizer)
    return self

  @property
  def attends_at_once(self) -> bool:
    """Whether the cells read no contexts, so that all steps attend at once."""
    return self.order == "luong" and not self.input_feeding

  @model_validator(mode="after")
  def _implementation(self):
    is_used = self.attention != "none" and self.attends_at_once
    if self.attention_implementation != "auto" and not is_used:
      raise ValueError(
        f"attention_implementation {self.attention_implementation!r} has no"
        " effect: it needs an attention other than 'none', order 'luong' and"
        " no input_feeding, so that all steps of a target attend at once; use"
        " 'auto'"
      )
    return self


class TransformerConfig(Section):
  """A Transformer encoder-decoder."""

  name: Literal["transformer"] = "transformer"
  model_size: Size = 128
  """Features of a token's representation."""
  feed_forward_size: Size = 256
  """Hidden size of the feed-forward networks."""
  num_heads: Size = 4
  """Attention heads of each layer."""
  encoder_layers: Size = 2
  """Layers of the encoder."""
  decoder_layers: Size = 2
  """Layers of the decoder."""
  score: TransformerScoreName = "scaled_dot"
  """Score of every head; in cross-attention scaled_dot for scores of positions.

  local_p is for cross-attention too. In the decoder's self-attention its center
  is a share of the keys up to the query. "forgetting" is scaled_dot with
  forget_gate.
  """
  max_distance: Size = 16
  """Largest distance that the scores shaw and disentangled distinguish."""
  window: Size = 10
  """Largest distance of a key from the center of local_m and local_p."""
  score_wrapper: Literal["none", ScoreWrapperName] = "none"
  """Wrapper of all scores; see attention.modules.LearnedScore."""
  soft_cap: AboveZero = 50.0
  """Bound of the scores, if score_wrapper is soft_cap."""
  forget_gate: bool = False
  """Forget gates in the decoder's self-attention, with other scores too.

  See "Forgetting Transformer", Lin et al., 2025 (arXiv:2503.02130). It is for
  scores other than scaled_dot, for which score="forgetting" is the same.
  """
  normalizer: NormalizerName = "softmax"
  """Function from a query's scores to its attention weights, in every head."""
  norm: Literal["pre", "post"] = "pre"
  """Layer normalisation before or after each sublayer."""
  positions: Literal["sinusoidal", "learned", "rotary", "alibi", "none"] = (
    "rotary"
  )
  """Position encoding: of embeddings, or of self-attention (rotary, alibi)."""
  tied_embeddings: bool = True
  """Whether embeddings and output projection share parameters."""
  dropout_rate: Rate = 0.0
  """Dropout of embeddings, sublayers and hidden layers."""
  attention_dropout_rate: Rate = 0.0
  """Dropout of attention weights."""
  scan_layers: Annotated[bool, CHANGEABLE] = False
  """Whether programs loop over equal layers, which shortens compilation."""
  remat: Annotated[bool, CHANGEABLE] = False
  """Whether to recompute a layer's activations in the backward pass."""
  attention_implementation: Annotated[ImplementationName, CHANGEABLE] = "auto"
  """Implementation of attention to whole sequences; see docs/clusters.md.

  "auto" is the choice of the library, which also serves decoding steps.
  "pallas" are kernels for TPUs and Hopper GPUs, which have been compiled and
  interpreted, but not run.
  """

  @property
  def score_name(self) -> str:
    """The score of `attention.modules`, without forget gates."""
    return "scaled_dot" if self.score == "forgetting" else self.score

  @property
  def has_forget_gates(self) -> bool:
    """Whether the decoder's self-attention has forget gates."""
    return self.forget_gate or self.score == "forgetting"

  @model_validator(mode="after")
  def _heads(self):
    if self.model_size % self.num_heads:
      raise ValueError(
        f"num_heads {self.num_heads} must divide model_size {self.model_size}"
      )
    if self.positions == "rotary" and (self.model_size // self.num_heads) % 2:
      raise ValueError(
        "rotary positions need an even number of features per head, got"
        f" {self.model_size // self.num_heads} (model_size / num_heads)"
      )
    return self

  @model_validator(mode="after")
  def _score(self):
    if self.score == "local_p":
      _check_is_softmax("score", self.normalizer)
    if self.score == "forgetting" and self.forget_gate:
      raise ValueError(
        "forget_gate has no effect with score 'forgetting', which has forget"
        " gates; use False, or another score"
      )
    return self


def _check_is_softmax(field: str, normalizer: str) -> None:
  """Raises ValueError for a normalizer that local_p does not support."""
  if not normalizer.startswith("softmax"):
    raise ValueError(
      f"{field} 'local_p' multiplies the weights of a softmax: it needs"
      f" normalizer 'softmax' or 'softmax_sink', got {normalizer!r}"
    )


MODELS: tuple[type[Section], ...] = (Seq2SeqConfig, TransformerConfig)
ModelConfig = Annotated[
  Seq2SeqConfig | TransformerConfig, Field(discriminator="name")
]
