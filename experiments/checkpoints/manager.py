"""Opens a run's checkpoints; decides which of them are kept."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from experiments.checkpoints.content import ITEMS
from experiments.checkpoints.damage import check_listing
from experiments.checkpoints.save import saving
from experiments.checkpoints.select import goodness
from experiments.distributed.multihost import first_process_only

FOLDER = "checkpoints"


@contextlib.contextmanager
def opened(
  workdir: Path,
  *,
  keep_last: int = 1,  # regular checkpoints
  keep_best: int = 0,
  best_metric: str = "loss",
  # Whether an uninterrupted run saves at a step.
  is_regular: Callable[[int], bool] = lambda step: True,
  read_only: bool = False,
) -> Iterator[ocp.CheckpointManager]:
  """Opens the checkpoints of a run; waits for pending saves at the end."""
  rank = functools.partial(goodness, best_metric)
  folder = workdir.absolute() / FOLDER
  first_process_only(
    functools.partial(check_listing, folder, best_metric, read_only=read_only)
  )
  policy = preservation_policy.AnyPreservationPolicy(
    [
      _LastRegular(keep_last, is_regular),
      preservation_policy.BestN(
        get_metric_fn=rank,
        n=keep_best,
        keep_checkpoints_without_metrics=False,
      ),
    ]
  )
  manager = ocp.CheckpointManager(
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
  with saving(manager):
    manager.close()


@dataclasses.dataclass
class _LastRegular(preservation_policy.PreservationPolicy):
  """Keeps the last checkpoint, regular or not, and the last regular ones."""

  count: int
  is_regular: Callable[[int], bool]

  def should_preserve(
    self,
    checkpoints: Sequence[Any],
    *,
    context: preservation_policy.PreservationContext,
  ) -> Sequence[bool]:
    """Returns whether to keep each checkpoint; they are sorted by step."""
    del context
    steps = [each.step for each in checkpoints]
    regular = [step for step in steps if self.is_regular(step)]
    kept = {*regular[-self.count :], *steps[-1:]}
    return [step in kept for step in steps]
