"""Trackers receive the metrics of a run, for display while it trains."""

import importlib.util
import secrets
from collections.abc import Mapping
from pathlib import Path

from experiments import run_directory
from experiments.config import Config
from experiments.errors import UserError


class TensorBoard:
  """Writes TensorBoard events to the run directory."""

  def __init__(self, workdir: Path, step: int):
    """Makes TensorBoard ignore events after `step`, the last one."""
    from tensorboardX import SummaryWriter

    self._files = run_directory.LocalFiles(workdir)
    self._writer = SummaryWriter(str(self._files.path), purge_step=step + 1)

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Writes metrics of a step by names such as "train/loss"."""
    for name, value in values.items():
      self._writer.add_scalar(name, value, step)

  def close(self) -> None:
    """Writes the last events."""
    self._writer.close()
    self._files.close()


class WeightsAndBiases:
  """Sends metrics to Weights & Biases, whose environment variables apply."""

  def __init__(self, config: Config, workdir: Path):
    """Starts or resumes the run of a directory."""
    import wandb

    self._files = run_directory.LocalFiles(workdir)
    path = workdir / "wandb_id"
    if not path.exists():
      run_directory.write_text(path, secrets.token_hex(8))
    self._run = wandb.init(
      id=path.read_text(encoding="utf-8"),
      resume="allow",
      name=workdir.name,
      config=config.model_dump(),
      dir=self._files.path,
    )
    # W&B's own step cannot go back, as it does when a run resumes.
    self._run.define_metric("*", step_metric="step")

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Sends metrics of a step by names such as "train/loss"."""
    self._run.log({"step": step, **values})

  def close(self) -> None:
    """Ends the run."""
    self._run.finish()
    self._files.close()


Tracker = TensorBoard | WeightsAndBiases


def check(name: str) -> None:
  """Raises UserError if the package of a tracker is not installed."""
  if name == "wandb" and importlib.util.find_spec("wandb") is None:
    raise UserError(
      "config.train.tracker: 'wandb' is not installed; run pip install -e"
      " '.[wandb]', or use 'tensorboard'"
    )


def make_tracker(config: Config, workdir: Path, step: int) -> Tracker:
  """Starts the tracker of `config.train.tracker` after a step."""
  if config.train.tracker == "wandb":
    return WeightsAndBiases(config, workdir)
  return TensorBoard(workdir, step)
