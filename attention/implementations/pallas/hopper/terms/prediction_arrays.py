"""The arrays of local-p's prediction, in the kernels for Hopper GPUs."""

import dataclasses
from typing import Any

import jax

from attention.implementations.pallas.hopper.tiles.parts import Slice
from attention.implementations.pallas.hopper.traced.pairs import PairFunction
from attention.implementations.pallas.operands import Operand

# Names of inputs: W and v of the prediction, and the predicted p / S.
MATRIX, VECTOR = "position matrix", "position vector"
SHARES = "predicted shares"


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
  """What kernels predict."""

  score: Any  # of known shares, in place of local-p
  # The shares of `score`, as a placeholder: kernels put the predicted shares in
  # place of the argument that is this array.
  shares: jax.Array
  operands: dict[str, Operand]

  def slices(self) -> dict[str, Slice]:
    """The gradients of arrays to which the kernel of queries adds, by name."""
    return {name: Slice(x.core) for name, x in self.operands.items()}

  def named(self, function: PairFunction) -> PairFunction:
    """The function of a score, whose argument of shares has its name."""
    names = [
      SHARES if operand.array is self.shares else name
      for operand, name in zip(function.operands, function.names)
    ]
    return dataclasses.replace(function, names=names)


def matrix_tile(problem: Any) -> str:
  """The name of the tile for a part of the matrix, of a block of queries."""
  # Memory is scarce. At other times this tile has the matrix of a map.
  if problem.projections is not None:
    return "projection"
  own_map = problem.maps.get("query")
  matrices = [] if own_map is None else [*own_map.matrices]
  return matrices[0] if matrices else "prediction"
