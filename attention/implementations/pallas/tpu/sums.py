"""The gradients of operands, which the kernels for TPUs sum over visits.

The kernel of queries sums those of whole arrays and of numbers of queries, the
kernel of keys those of numbers of keys. That of an array of pairs is computed
by a kernel of its own, `gradient.of_pairs`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attention.implementations.pallas.operands import Kind, Operand
from attention.implementations.pallas.tpu import whole
from attention.implementations.pallas.tpu.visit import as_row
from attention.implementations.pallas.visits import FIRST, LAST


def kernel_of(operand: Operand) -> str:
  """The kernel that computes the gradient of an operand."""
  return {Kind.ROW: "keys", Kind.TILE: "pairs"}.get(operand.kind, "queries")


def is_whole(operand: Operand) -> bool:
  """Whether all visits of a kernel add to one sum."""
  return operand.kind in (Kind.WHOLE, Kind.SCALAR)


def scratch_shape(
  operand: Operand, tile: tuple[int, int]
) -> tuple[int, ...] | None:
  """The shape of the sum of a tile; None if outputs are summed themselves."""
  return None if is_whole(operand) else operand.part(*tile)


def restored(gradient: jax.Array, operand: Operand) -> jax.Array:
  """A gradient that a kernel has written, [leading..., core...]."""
  if is_whole(operand):
    return whole.restored(gradient, operand)
  return gradient[..., 0, :]


@dataclasses.dataclass(frozen=True)
class Sums:
  """The sums of the gradients of some operands."""

  operands: Sequence[Operand]
  outputs: Sequence[Any]
  scratch: Sequence[Any]  # in that order, for operands that are not whole

  @property
  def _sums(self):
    scratch = iter(self.scratch)
    for operand, output in zip(self.operands, self.outputs, strict=True):
      yield operand, output, None if is_whole(operand) else next(scratch)

  def start(self, visit: Any) -> None:
    """Sets sums to zero at their first visit."""
    for operand, output, summed in self._sums:
      if summed is None:
        is_first, ref = whole.is_first(visit, operand), output
      else:
        is_first, ref = visit.has(FIRST), summed

      @pl.when(is_first)
      def _(ref=ref):
        ref[...] = jnp.zeros_like(ref)

  def add(self, gradients: Sequence[jax.Array], rows: slice) -> None:
    """Adds the gradients of the operands' parts, of a chunk of queries."""
    for (operand, output, summed), gradient in zip(
      self._sums, gradients, strict=True
    ):
      if summed is None:
        whole.add(output, gradient, operand)
      elif operand.kind is Kind.ROW:
        summed[...] += gradient
      else:
        summed[rows, :] += gradient

  def finish(self, visit: Any) -> None:
    """Writes the sums of a tile at its last visit."""
    for operand, output, summed in self._sums:
      if summed is None:
        continue

      @pl.when(visit.has(LAST))
      def _(operand=operand, output=output, summed=summed):
        is_column = operand.kind is Kind.COLUMN
        total = as_row(summed[...]) if is_column else summed[...]
        output[...] = total.astype(output.dtype)
