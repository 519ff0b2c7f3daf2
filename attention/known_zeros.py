"""Pytrees whose Python zeros `jax.jit` and `jax.shard_map` do not trace."""

# `tree_flatten` and `tree_unflatten` are JAX's protocol.
# ruff: noqa: D102

import dataclasses
from typing import Any, Self

import jax


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class WithKnownZeros:
  """A pytree, such as a score whose positions start at 0."""

  # Other numbers are traced, as a program would be compiled for each.

  tree: Any

  def tree_flatten(self) -> tuple[list[Any], tuple[Any, tuple[bool, ...]]]:
    leaves, structure = jax.tree.flatten(self.tree)
    is_zero = tuple(type(leaf) is int and leaf == 0 for leaf in leaves)
    traced = [leaf for leaf, zero in zip(leaves, is_zero) if not zero]
    return traced, (structure, is_zero)

  @classmethod
  def tree_unflatten(cls, known: Any, traced: Any) -> Self:
    structure, is_zero = known
    rest = iter(traced)
    leaves = [0 if zero else next(rest) for zero in is_zero]
    return cls(jax.tree.unflatten(structure, leaves))
