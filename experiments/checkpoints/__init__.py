"""Checkpoints of a run; the only package that knows Orbax."""

from experiments.checkpoints.damage import DamagedCheckpointError
from experiments.checkpoints.manager import FOLDER, opened
from experiments.checkpoints.restore import restore, restore_last
from experiments.checkpoints.restore_parameters import parameters
from experiments.checkpoints.save import UnsavedCheckpointError, save, wait
from experiments.checkpoints.select import choose

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
