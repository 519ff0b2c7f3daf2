"""Opens a run's checkpoints; decides which of them are kept."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from experiments.checkpoints.content import ITEMS
from experiments.checkpoints.damage import check_listing
from experiments.checkpoints.listing import is_uploaded
from experiments.checkpoints.select import goodness
from experiments.checkpoints.storage import Manager, UploadingManager
from experiments.config import TrainConfig
from experiments.distributed.multihost import first_process_only
from experiments.run_directory import CHECKPOINTS, absolute


@contextlib.contextmanager
def opened(
  workdir: Path, config: TrainConfig, *, read_only: bool = False
) -> Iterator[Manager]:
  """Opens the checkpoints of a run; waits for pending saves at the end."""
  rank = functools.partial(goodness, config.best_metric)
  folder = absolute(workdir) / CHECKPOINTS
  first_process_only(
    lambda: check_listing(folder, config.best_metric, read_only=read_only)
  )
  kept = [
    _LastRegular(config),
    preservation_policy.BestN(
      get_metric_fn=rank,
      n=config.keep_best,
      keep_checkpoints_without_metrics=False,
    ),
  ]
  policy = preservation_policy.AnyPreservationPolicy(kept)
  make = UploadingManager if is_uploaded(folder) else Manager
  manager = make(
    folder,
    options=ocp.CheckpointManagerOptions(
      preservation_policy=None if read_only else policy,
      best_fn=rank,
      read_only=read_only,
      enable_async_checkpointing=not read_only,
    ),
    item_names=ITEMS,
  )
  try:
    yield manager
  except BaseException:
    # With several processes, close() would also wait for dead ones.
    if jax.process_count() == 1:
      with contextlib.suppress(Exception):
        manager.close()
    raise
  with manager.saving():
    manager.close()


@dataclasses.dataclass
class _LastRegular(preservation_policy.PreservationPolicy):
  """Keeps the last checkpoint, and the last that no signal caused."""

  config: TrainConfig

  def should_preserve(self, checkpoints: Sequence[Any], *, context):
    """Returns whether to keep each checkpoint; they are sorted by step."""
    del context
    steps = [each.step for each in checkpoints]
    regular = list(filter(self.config.saves_at, steps))
    kept = {*regular[-self.config.keep_last :], *steps[-1:]}
    return [step in kept for step in steps]
