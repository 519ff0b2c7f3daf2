"""Decoding: greedy search, sampling and beam search.

Works on every model with `start(source, max_length) -> memory, carry` and
`step(memory, carry, token) -> carry, logits, weights`. The functions are pure,
for the caller to jit; all arguments but parameters, source and rng are static.
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
