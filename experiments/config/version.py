"""The schema version, and migration of configs that older versions wrote."""

import copy
from collections.abc import Mapping
from typing import Any

from experiments.config.training import UNUSED, OptimizerConfig
from experiments.errors import UserError

VERSION = 2


def migrated(raw: Mapping[str, Any]) -> dict[str, Any]:
  """Returns a stored config in the current schema; new fields get defaults."""
  version = raw.get("version", 1)
  if not isinstance(version, int) or not 1 <= version <= VERSION:
    raise UserError(
      f"config.version: got {version!r}; this version of the code reads 1 to"
      f" {VERSION}: use the code that wrote the config"
    )
  config = {**copy.deepcopy(dict(raw)), "version": VERSION}
  for migrate in _MIGRATIONS[version - 1 :]:
    migrate(config)
  return config


def _from_1_to_2(config: dict[str, Any]) -> None:
  """In version 1, adamw decayed all parameters; unused fields had values."""
  data, optimizer = config.get("data"), config.get("optimizer")
  for side in ("source_tokenizer", "target_tokenizer"):
    tokenizer = data.get(side) if isinstance(data, dict) else None
    # SentencePiece's sampling of subwords is not reproducible.
    if isinstance(tokenizer, dict) and tokenizer.pop("sampling", 0.0):
      raise UserError(
        f"config.data.{side}.sampling: no longer supported; use the code that"
        " wrote the config"
      )
  if not isinstance(optimizer, dict):
    return
  if optimizer.get("name") == "adamw":
    optimizer["weight_decay_of"] = "all"
  for name in UNUSED.get(str(optimizer.get("name")), ()):
    optimizer[name] = OptimizerConfig.model_fields[name].default


# The migration at index n - 1 is from version n.
_MIGRATIONS = (_from_1_to_2,)
