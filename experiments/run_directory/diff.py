"""Differences between two nested dictionaries."""

from collections.abc import Mapping
from typing import Any

MISSING = "missing"


def differences(
  ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = ""
) -> dict[str, tuple[Any, Any]]:
  """Maps the path of each field that differs to (our value, their value)."""
  found: dict[str, tuple[Any, Any]] = {}
  for name in dict.fromkeys([*ours, *theirs]):
    mine, other = ours.get(name, MISSING), theirs.get(name, MISSING)
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
      found |= differences(mine, other, f"{path}{name}.")
    elif mine != other:
      found[f"{path}{name}"] = mine, other
  return found
