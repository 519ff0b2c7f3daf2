"""Decoding: from a source to a target, one token after the other.

Works on any model with `start(source, max_length) -> memory, carry` and
`step(memory, carry, token) -> carry, logits, weights`. All are pure functions
for a caller to jit; everything but parameters, source and rng is static.
"""

from experiments.decode.alignment import alignments
from experiments.decode.beam_search import Hypotheses, beam
from experiments.decode.constraints import Constraints
from experiments.decode.sampling import greedy, sample

__all__ = [
  "Constraints",
  "Hypotheses",
  "alignments",
  "beam",
  "greedy",
  "sample",
]
