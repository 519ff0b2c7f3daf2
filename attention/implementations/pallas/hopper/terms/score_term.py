"""What a score has besides products of tokens: its arrays and its memory."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from attention.implementations.pallas.hopper.tiles.layout import Kernel
from attention.implementations.pallas.hopper.tiles.parts import Slice
from attention.implementations.pallas.operands import Kind, Operand


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ScoreTerm:
  """Vectors, sinusoids, projections, maps of tokens or a prediction.

  This class itself is that of a score without them. Arguments `own` are the own
  tokens of a block, "query" or "key".
  """

  # Arrays that kernels read, by the names of inputs: those with gradients from
  # kernels, others, and of both those that the kernel of keys does not read.
  differentiable: Mapping[str, Operand] = dataclasses.field(
    default_factory=dict
  )
  constants: Mapping[str, Operand] = dataclasses.field(default_factory=dict)
  unread_by_keys: Collection[str] = ()
  # Numbers of queries that the kernel of queries writes for that of keys: those
  # that a block computes before its visits, and others.
  own_numbers: Sequence[str] = ()
  for_keys: Sequence[str] = ()
  # By "query" and "key", the `TokenMap` of a block with these own tokens.
  maps: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  is_projection: bool = False
  # The tile that has room for the matrix of a prediction.
  matrix_tile: str = "prediction"

  def slices(self, own: str) -> dict[str, Slice]:
    """What the kernel of own tokens adds to gradients of arrays, by name."""
    return {
      name: Slice(each.core)
      for name, each in self.differentiable.items()
      if own == "query" and each.kind is not Kind.SCALAR
    }

  def tiles(self, kernel: Kernel) -> dict[str, Any]:
    """The tiles of a block besides those of inputs."""
    return {}

  def written_over(self, kernel: Kernel) -> dict[str, str]:
    """By the names of results, the tiles that are read before these exist."""
    is_read = kernel.own == "query" and "context" in kernel.inputs
    return {"tokens": "context"} if is_read else {}

  def memory(self, kernel: Kernel) -> dict[str, Any]:
    """Other shared memory of a block."""
    return {}

  def num_tables(self, kernel: Kernel, *, is_scarce: bool = False) -> int:
    """The tiles [64, D] for parts of matrices; fewer if memory `is_scarce`."""
    return 0

  def unused(
    self, tiles: Mapping[str, Any], results: Mapping[str, Any], own: str
  ) -> list[Any]:
    """Tiles that have room for parts of matrices while a block needs these."""
    return []
