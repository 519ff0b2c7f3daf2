"""Names of scores and normalizers, for modules and configs."""

# This module does not import JAX: it is also read to show `--help`.

from typing import Literal

ScoreName = Literal[
  "dot", "scaled_dot", "general", "additive", "concat", "cosine"
]
# Scores that depend on positions too.
PositionalScoreName = Literal[
  "location",
  "local_m",
  "local_p",
  "shaw",
  "disentangled",
  "transformer_xl",
]
ScoreWrapperName = Literal["soft_cap", "qk_norm", "temperature"]
NormalizerName = Literal[
  "softmax",
  "softmax_sink",
  "sigmoid",
  "softpick",
  "signed_softmax",
  "entmax",
  "sparsemax",
  "stick_breaking",
]
