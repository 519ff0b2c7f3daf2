"""Restores a run; evaluates it, translates with it and prunes its heads."""

from experiments.checkpoints.restore_run import Restored, restore
from experiments.inference.restored import evaluate, evaluation_set
from experiments.inference.run import Run
from experiments.inference.translator import make_translator

__all__ = [
  "Restored",
  "Run",
  "evaluate",
  "evaluation_set",
  "make_translator",
  "restore",
]
