"""Equality of masks, biases and scores, which may hold arrays."""

import dataclasses
from typing import Any

_KNOWN = (bool, int, float, str, type(None))


class EqualByValue:
  """Equal by value if all fields are Python scalars, by identity otherwise.

  A function compiled for one `masks.causal()` as a static argument is then not
  compiled again for the next one. Arrays are not compared.
  """

  def __eq__(self, other: object) -> bool:
    if type(self) is not type(other):
      return NotImplemented
    mine, others = _known(self), _known(other)
    if mine is None or others is None:
      return self is other
    return mine == others

  def __hash__(self) -> int:
    fields = _known(self)
    if fields is None:
      return object.__hash__(self)
    return hash((type(self), fields))


def _known(value: Any) -> tuple | None:
  """The fields of a dataclass, or None if one cannot be compared."""
  if not dataclasses.is_dataclass(value):
    return None
  fields = [getattr(value, each.name) for each in dataclasses.fields(value)]
  if all(_is_known(each) for each in fields):
    return tuple(fields)
  return None


def _is_known(value: Any) -> bool:
  if isinstance(value, EqualByValue):
    return _known(value) is not None
  return isinstance(value, _KNOWN)
