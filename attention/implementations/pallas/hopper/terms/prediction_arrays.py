"""The arrays of local-p's prediction, in the kernels for Hopper GPUs."""

import dataclasses
from typing import Any

import jax

from attention.implementations.pallas.hopper.terms.score_term import ScoreTerm
from attention.implementations.pallas.hopper.traced.pairs import PairFunction

# Names of inputs: W and v of the prediction, and the predicted p / S.
MATRIX, VECTOR = "position matrix", "position vector"
SHARES = "predicted shares"


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction(ScoreTerm):
  """What kernels predict."""

  score: Any  # of known shares, in place of local-p
  # The shares of `score`, as a placeholder: kernels put the predicted shares in
  # place of the argument that is this array.
  shares: jax.Array

  def named(self, function: PairFunction) -> PairFunction:
    """The function of a score, whose argument of shares has its name."""
    names = [
      SHARES if operand.array is self.shares else name
      for operand, name in zip(function.operands, function.names)
    ]
    return dataclasses.replace(function, names=names)
