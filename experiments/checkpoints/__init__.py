"""Checkpoints of a run; the only package that knows Orbax."""

from experiments.checkpoints.damage import (
  DamagedCheckpointError as DamagedCheckpointError,
)
from experiments.checkpoints.manager import FOLDER as FOLDER
from experiments.checkpoints.manager import opened as opened
from experiments.checkpoints.restore import restore as restore
from experiments.checkpoints.restore import restore_last as restore_last
from experiments.checkpoints.restore_parameters import parameters as parameters
from experiments.checkpoints.save import (
  UnsavedCheckpointError as UnsavedCheckpointError,
)
from experiments.checkpoints.save import save as save
from experiments.checkpoints.save import wait as wait
from experiments.checkpoints.select import choose as choose
