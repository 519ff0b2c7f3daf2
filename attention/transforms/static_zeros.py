"""Pytrees whose Python zeros are static for `jax.jit` and `jax.shard_map`."""

# `tree_flatten` and `tree_unflatten` are JAX's protocol.
# ruff: noqa: D102

import dataclasses
import itertools
from typing import Any, Self

import jax


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class StaticZeros:
  """A pytree, such as a score whose positions start at 0."""

  # Other numbers are traced, as a program would be compiled for each.

  tree: Any

  @property
  def is_traced(self) -> tuple[bool, ...]:
    """For each leaf of the tree, whether it is not a Python zero."""
    leaves = jax.tree.leaves(self.tree)
    return tuple(type(leaf) is not int or leaf != 0 for leaf in leaves)

  def tree_flatten(self) -> tuple[list[Any], tuple[Any, tuple[bool, ...]]]:
    leaves, structure = jax.tree.flatten(self.tree)
    traced = [*itertools.compress(leaves, self.is_traced)]
    return traced, (structure, self.is_traced)

  @classmethod
  def tree_unflatten(cls, known: Any, traced: Any) -> Self:
    structure, is_traced = known
    rest = iter(traced)
    leaves = [next(rest) if own else 0 for own in is_traced]
    return cls(jax.tree.unflatten(structure, leaves))
