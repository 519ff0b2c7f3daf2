"""Decoding: greedy search, sampling and beam search, for the caller to jit.

A model has `start(source, max_length) -> memory, carry` and
`step(memory, carry, token) -> carry, logits, weights`.
"""

from experiments.decoding.beam_search import Hypotheses, beam
from experiments.decoding.constraints import Constraints
from experiments.decoding.sampling import greedy, sample

__all__ = [
  "Constraints",
  "Hypotheses",
  "beam",
  "greedy",
  "sample",
]
