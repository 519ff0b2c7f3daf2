"""Fields of nested dictionaries: differences and updates."""

from collections.abc import Mapping
from typing import Any

from experiments.errors import UserError

MISSING = "missing"


def differences(
  ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str = ""
) -> dict[str, tuple[Any, Any]]:
  """Maps the path of each field that differs to both values."""
  found: dict[str, tuple[Any, Any]] = {}
  for name in dict.fromkeys([*ours, *theirs]):
    mine, other = ours.get(name, MISSING), theirs.get(name, MISSING)
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
      found |= differences(mine, other, f"{path}{name}.")
    elif mine != other:
      found[f"{path}{name}"] = mine, other
  return found


def set_field(config: dict[str, Any], path: str, value: Any) -> None:
  """Sets the field at a path such as "train.steps"."""
  *sections, name = path.split(".")
  for section in sections:
    config = config.setdefault(section, {})
    if not isinstance(config, dict):
      raise UserError(f"config.{path}: config.{section} has no fields")
  config[name] = value
