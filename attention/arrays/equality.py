"""Equality of masks, biases and scores, which may hold arrays."""

from typing import Any

import jax


class EqualByValue:
  """Equal by value if all leaves are Python scalars, by identity otherwise."""

  # One compiled function then serves all instances of `masks.causal()`.
  def __eq__(self, other: object) -> bool:
    if type(self) is not type(other):
      return NotImplemented
    value = _value(self)
    return self is other or (value is not None and value == _value(other))

  def __hash__(self) -> int:
    value = _value(self)
    return object.__hash__(self) if value is None else hash(value)


def _value(pytree: Any) -> tuple | None:
  """The structure and the leaves of a pytree, or None if a leaf is an array."""
  leaves, structure = jax.tree.flatten(pytree)
  if all(isinstance(leaf, bool | int | float | str) for leaf in leaves):
    return structure, *leaves
  return None
