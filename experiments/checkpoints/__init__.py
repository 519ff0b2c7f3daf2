"""Checkpoints of a run; the only package that imports Orbax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from experiments.checkpoints.damage import DamagedCheckpointError
  from experiments.checkpoints.listing import FOLDER, last_step
  from experiments.checkpoints.manager import opened
  from experiments.checkpoints.of_run import run_parameters
  from experiments.checkpoints.on_demand import opened_on_demand
  from experiments.checkpoints.read import parameters, restore, restore_last
  from experiments.checkpoints.select import choose
  from experiments.checkpoints.warm_start import warm_started
  from experiments.checkpoints.write import UnsavedCheckpointError, save, wait

__all__ = [
  "FOLDER",
  "DamagedCheckpointError",
  "UnsavedCheckpointError",
  "choose",
  "last_step",
  "opened",
  "opened_on_demand",
  "parameters",
  "restore",
  "restore_last",
  "run_parameters",
  "save",
  "wait",
  "warm_started",
]

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
