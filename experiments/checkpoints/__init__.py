"""Checkpoints of a run; the only package that imports Orbax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from experiments.checkpoints.damage import (
    DamagedCheckpointError as DamagedCheckpointError,
  )
  from experiments.checkpoints.listing import FOLDER as FOLDER
  from experiments.checkpoints.listing import last_step as last_step
  from experiments.checkpoints.manager import opened as opened
  from experiments.checkpoints.of_run import run_parameters as run_parameters
  from experiments.checkpoints.on_demand import (
    opened_on_demand as opened_on_demand,
  )
  from experiments.checkpoints.read import parameters as parameters
  from experiments.checkpoints.read import restore as restore
  from experiments.checkpoints.read import restore_last as restore_last
  from experiments.checkpoints.select import choose as choose
  from experiments.checkpoints.warm_start import warm_started as warm_started
  from experiments.checkpoints.write import (
    UnsavedCheckpointError as UnsavedCheckpointError,
  )
  from experiments.checkpoints.write import save as save
  from experiments.checkpoints.write import wait as wait

_MODULES = {
  "damage": ("DamagedCheckpointError",),
  "listing": ("FOLDER", "last_step"),
  "manager": ("opened",),
  "of_run": ("run_parameters",),
  "on_demand": ("opened_on_demand",),
  "read": ("parameters", "restore", "restore_last"),
  "select": ("choose",),
  "warm_start": ("warm_started",),
  "write": ("UnsavedCheckpointError", "save", "wait"),
}


def __getattr__(name: str) -> Any:
  """Imports on first use (PEP 562), because Orbax takes long to import."""
  for module, names in _MODULES.items():
    if name in names:
      return getattr(importlib.import_module(f"{__name__}.{module}"), name)
  raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
