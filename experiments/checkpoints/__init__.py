"""Checkpoints of a run; the only package that knows Orbax."""

from experiments.checkpoints.choosing import choose, parameters
from experiments.checkpoints.damage import DamagedCheckpointError
from experiments.checkpoints.manager import FOLDER, opened
from experiments.checkpoints.restoring import restore, restore_last
from experiments.checkpoints.saving import UnsavedCheckpointError, save, wait

__all__ = [
  "FOLDER",
  "DamagedCheckpointError",
  "UnsavedCheckpointError",
  "choose",
  "opened",
  "parameters",
  "restore",
  "restore_last",
  "save",
  "wait",
]
