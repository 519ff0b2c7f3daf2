"""What differs between two configs."""

from collections.abc import Mapping
from typing import Any


def differences(
  ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = "config"
) -> list[str]:
  """Lists the fields in which two configs differ.

  Args:
    ours: nested dictionaries.
    theirs: likewise.
    path: the name of the whole.

  Returns:
    One line a field: its name, their value and ours.

  Example:
    >>> differences({"a": {"b": 1}}, {"a": {"b": 2}})
    ['config.a.b: 2 there, 1 here']
  """
  lines = []
  for name in dict.fromkeys([*ours, *theirs]):
    mine, other = ours.get(name, "missing"), theirs.get(name, "missing")
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
      lines += differences(mine, other, f"{path}.{name}")
    elif mine != other:
      lines.append(f"{path}.{name}: {other!r} there, {mine!r} here")
  return lines
