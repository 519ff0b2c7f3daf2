"""Equality of masks, biases and scores, which may hold arrays."""

import dataclasses
from typing import Any


class EqualByValue:
  """Equal by value if all fields are Python scalars, by identity otherwise.

  A function with a static argument is then compiled once for all instances of
  `masks.causal()`. Arrays are not compared.
  """

  def __eq__(self, other: object) -> bool:
    if type(self) is not type(other):
      return NotImplemented
    fields = _comparable_fields(self)
    return self is other or (
      fields is not None and fields == _comparable_fields(other)
    )

  def __hash__(self) -> int:
    fields = _comparable_fields(self)
    if fields is None:
      return object.__hash__(self)
    return hash((type(self), fields))


def _comparable_fields(value: Any) -> tuple | None:
  """The fields of a dataclass, or None if one cannot be compared by value."""
  if not dataclasses.is_dataclass(value):
    return None
  fields = [getattr(value, each.name) for each in dataclasses.fields(value)]
  for field in fields:
    if isinstance(field, EqualByValue):
      if _comparable_fields(field) is None:
        return None
    elif not isinstance(field, bool | int | float | str | None):
      return None
  return tuple(fields)
