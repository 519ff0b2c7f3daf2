"""A pytree that holds one function."""

# `tree_flatten` and `tree_unflatten` are JAX's protocol.
# ruff: noqa: D102

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import jax


@dataclasses.dataclass(frozen=True, eq=False)
class FunctionPytree:
  """Inherit from it, and register the class as a pytree node."""

  function: Callable[..., Any]

  def tree_flatten(self) -> tuple[tuple, Any]:
    # A callable that is a pytree (`jax.tree_util.Partial`) keeps its leaves.
    if jax.tree_util.all_leaves([self.function]):
      return (), self.function
    return (self.function,), None

  @classmethod
  def tree_unflatten(cls, function: Any, children: tuple) -> Self:
    return cls(*children) if children else cls(function)
