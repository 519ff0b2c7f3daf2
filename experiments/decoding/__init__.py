"""Decoding: from a source to a target, one token after the other.

Works on any model with `start(source, max_length) -> memory, carry` and
`step(memory, carry, token) -> carry, logits, weights`. All are pure functions
for a caller to jit; everything but parameters, source and rng is static.
"""

from experiments.decoding.attention_weights import alignments
from experiments.decoding.beam_search import Hypotheses, beam
from experiments.decoding.constraints import Constraints
from experiments.decoding.sampling import greedy, sample

__all__ = [
  "Constraints",
  "Hypotheses",
  "alignments",
  "beam",
  "greedy",
  "sample",
]
