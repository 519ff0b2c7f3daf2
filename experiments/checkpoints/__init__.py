"""Checkpoints of a run; the only package that imports Orbax."""

from experiments.checkpoints.damage import (
  DamagedCheckpointError as DamagedCheckpointError,
)
from experiments.checkpoints.manager import FOLDER as FOLDER
from experiments.checkpoints.manager import opened as opened
from experiments.checkpoints.of_run import run_parameters as run_parameters
from experiments.checkpoints.read import parameters as parameters
from experiments.checkpoints.read import restore as restore
from experiments.checkpoints.read import restore_last as restore_last
from experiments.checkpoints.save import (
  UnsavedCheckpointError as UnsavedCheckpointError,
)
from experiments.checkpoints.save import save as save
from experiments.checkpoints.save import wait as wait
from experiments.checkpoints.select import choose as choose
from experiments.checkpoints.warm_start import has_any as has_any
from experiments.checkpoints.warm_start import warm_started as warm_started
