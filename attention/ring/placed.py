"""Masks and biases of a whole sequence, asked about a part of it."""

# Overrides keep the docstrings of what they override.
# ruff: noqa: D102

import dataclasses

import jax

from attention.biases.types import Bias
from attention.masks.types import Mask
from attention.positional import Pairwise


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Placed(Pairwise):
  """Values for queries that begin at `row`, and keys that do at `column`."""

  inner: Pairwise
  row: jax.Array
  column: jax.Array

  @property
  def leading_rank(self):
    return self.inner.leading_rank

  def block(self, rows, columns, rank):
    return self.inner.block(rows + self.row, columns + self.column, rank)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PlacedMask(Placed, Mask):
  """A placed mask combines as other masks do."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PlacedBias(Placed, Bias):
  """A placed bias adds as other biases do."""
