"""What differs between two configs."""

from collections.abc import Collection, Mapping
from typing import Any


def differences(
  ours: Mapping[str, Any],
  theirs: Mapping[str, Any],
  path: str = "config",
  *,
  may_differ: Collection[str] = (),
) -> list[str]:
  """Lists the fields in which two configs differ.

  Args:
    ours: nested dictionaries.
    theirs: likewise.
    path: the name of the whole.
    may_differ: fields and sections that are not listed, such as "train.steps".

  Returns:
    One line a field: its name, their value and ours.

  Example:
    >>> differences({"a": {"b": 1}}, {"a": {"b": 2}})
    ['config.a.b: 2 there, 1 here']
  """
  lines = []
  for name in dict.fromkeys([*ours, *theirs]):
    field = f"{path}.{name}"
    mine, other = ours.get(name, "missing"), theirs.get(name, "missing")
    if field.partition(".")[2] in may_differ:
      continue
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
      lines += differences(mine, other, field, may_differ=may_differ)
    elif mine != other:
      lines.append(f"{field}: {other!r} there, {mine!r} here")
  return lines
