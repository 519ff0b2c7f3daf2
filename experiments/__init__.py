"""Experiments about attention, run as `python -m experiments.train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from pathlib import Path

  from experiments.inference.run import Run

__all__ = ["load"]


def load(workdir: str | Path, checkpoint: str | None = None) -> Run:
  """Loads a trained run, to translate, score and look at attention weights.

  Args:
    workdir: the run directory.
    checkpoint: "last", "best", a step, or "last:10" and "best:10" for the mean
      of ten; None for the config's `evaluation.checkpoint`.

  Returns:
    The run, with the parameters on all local devices.

  Raises:
    UserError: if there is no run, no such checkpoint, or it is damaged.

  Example:
    >>> run = load("releases/numbers")
    >>> run.translate(["twelve thousand and one"])
    ['만 이천일']
    >>> run.attention("twelve").source
    ['_twelve', '</s>']
  """
  # JAX and the models take seconds to import.
  from experiments.errors import naming_arguments
  from experiments.inference import Run, restore
  from experiments.run_directory import run_path

  with naming_arguments():
    return Run(restore(run_path(workdir), checkpoint), str(workdir))
