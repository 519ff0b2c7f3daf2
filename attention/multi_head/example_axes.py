"""Examples of a batch that axes of a mesh shard.

The axis of examples is the first of the leading axes. Parameters of masks have
the leftmost leading axes of the scores, and those of biases and scores the
rightmost.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from attention.arrays.head_parameters import head_axes
from attention.biases import as_bias
from attention.biases import types as biases
from attention.dropout import Dropout, GroupDropout
from attention.masks import types as masks
from attention.masks.types import as_mask
from attention.positional.base import (
  ArrayValues,
  AtPositions,
  Combination,
  Pairwise,
  View,
)
from attention.scores.placed_examples import PlacedExamples

# Whether a leaf has the axis, from its shape.
_Rule = Callable[[Sequence[int]], bool]


@dataclasses.dataclass(frozen=True)
class Examples:
  """The examples of a call, and the mesh axes that shard them."""

  names: tuple[str, ...]
  num_shards: int
  count: int
  rank: int  # the number of leading axes

  @classmethod
  def of(
    cls, names: tuple[str, ...], num_shards: int, *tokens: jax.Array
  ) -> Self:
    """The examples of queries, keys and values [B, ..., H, T, D]."""
    rank = max(each.ndim for each in tokens) - 2
    sizes = [each.shape[0] for each in tokens if each.ndim - 2 == rank > 1]
    count = max(sizes, default=1)
    if count == 1:
      return cls((), 1, count, rank)
    if count % num_shards:
      raise ValueError(
        f"{count} examples cannot be sharded over the {num_shards} devices of "
        f"the mesh axes {names}: the number of devices must divide them"
      )
    return cls(names, num_shards, count, rank)

  @property
  def axis(self) -> tuple[str, ...] | None:
    """The sharding of the axis of examples."""
    return self.names or None

  def spec_of_context(
    self, heads: str | None, sequence: str | None
  ) -> PartitionSpec:
    """The sharding of contexts [B, ..., H, T, E]."""
    names: list[Any] = [None] * (self.rank + 2)
    names[-3:-1] = heads, sequence
    if self.rank > 1:
      names[0] = self.axis
    return PartitionSpec(*names)

  def check_context(self, context: jax.Array) -> None:
    """Raises ValueError if a shard has more examples than its tokens."""
    own = self.count // self.num_shards
    if self.num_shards > 1 and context.shape[0] != own:
      raise ValueError(
        f"a shard of {own} examples has a context of shape {context.shape}: an "
        "array of the score has an axis of examples that is not declared; see "
        "MeshAxes.batch"
      )

  def has(self, tokens: jax.Array) -> bool:
    """Whether the first axis of tokens is one of examples."""
    return tokens.ndim - 2 == self.rank > 1 and tokens.shape[0] == self.count

  def of_owner(self, owner: Any) -> list[bool]:
    """Like `has`, for each leaf of a score or a normalizer."""
    if isinstance(owner, PlacedExamples):
      return [*self.of_owner(owner.score), True, True]
    # The axis of heads is the last of the leading axes.
    return [
      self.rank > 1 and axis == self.rank - 1 and leaf.shape[0] == self.count
      for leaf, axis in zip(jax.tree.leaves(owner), head_axes(owner))
    ]

  def options(self, *, mask, bias, dropout) -> tuple[Any, Any]:
    """Mask, bias and dropout, and their shardings."""
    mask = None if mask is None else as_mask(mask)
    bias = None if bias is None else as_bias(bias)
    pairs = {"mask": mask, "bias": bias}
    sharding = PartitionSpec(self.axis)

    def spec(has_examples):
      return sharding if has_examples else PartitionSpec()

    specs: dict[str, Any] = {
      name: jax.tree.unflatten(
        jax.tree.structure(each), map(spec, self._of_pairs(each))
      )
      for name, each in pairs.items()
    }
    return pairs | {"dropout": dropout}, specs | {"dropout": PartitionSpec()}

  def dropout(self, dropout: Dropout) -> Dropout:
    """The dropout of the examples of this device."""
    if self.num_shards == 1:
      return dropout
    index = jax.lax.axis_index(self.names)
    return GroupDropout(dropout, index, self.num_shards, axis=0)

  def _of_pairs(self, pairs: Pairwise | None) -> list[bool]:
    """Like `has`, for each leaf of a mask or a bias."""
    found: list[bool] = []

    def add(leaves: Any, rule: _Rule):
      found.extend(
        bool(shape) and shape[0] == self.count and rule(shape)
        for shape in map(jnp.shape, jax.tree.leaves(leaves))
      )

    def leftmost(core: int) -> _Rule:
      return lambda shape: len(shape) > core

    def rightmost(core: int) -> _Rule:
      return lambda shape: len(shape) - core == self.rank

    def visit(pairs: Any):
      match pairs:
        case Combination():
          visit(pairs.left)
          visit(pairs.right)
        case View():
          visit(pairs.inner)
          is_placed = isinstance(pairs.transform, AtPositions)
          add(pairs.transform, leftmost(1 if is_placed else 0))
        case biases.Scaled():
          visit(pairs.inner)
          add(pairs.factor, rightmost(0))
        case ArrayValues():
          add(pairs, rightmost(2))
        case biases.ByDistance():
          add(pairs, rightmost(1))
        case masks.Segments():
          add(pairs, leftmost(1))
        case masks.Band() | masks.Below():
          add(pairs, leftmost(0))
        case _:
          add(pairs, lambda shape: False)

    visit(pairs)
    return found
