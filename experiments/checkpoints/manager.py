"""The manager of a run's checkpoints: which are kept, and where."""

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
  keep_last: int = 1,
  keep_best: int = 0,
  best_metric: str = "loss",
  is_regular: Callable[[int], bool] = lambda step: True,
  read_only: bool = False,
) -> Iterator[ocp.CheckpointManager]:
  """Opens the checkpoints of a run; at the end waits for pending saves.

  Args:
    workdir: the run's directory.
    keep_last: number of last regular checkpoints kept; the very last one is
      always kept.
    keep_best: number of best ones kept besides.
    best_metric: decides which is best.
    is_regular: whether an undisturbed run saves a checkpoint at a step.
    read_only: whether only to restore.

  Yields:
    An Orbax manager, which saves asynchronously.

  Raises:
    UserError: if no checkpoint can be read; if one cannot and `read_only`.
    UnsavedCheckpointError: if a pending save failed.
  """
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
    # With several processes, closing waits for all, even for dead ones.
    if jax.process_count() == 1:
      with contextlib.suppress(Exception):
        manager.close()
    raise
  with saving(manager):
    manager.close()


@dataclasses.dataclass
class _LastRegular(preservation_policy.PreservationPolicy):
  """Keeps the last checkpoint, and the last `count` regular ones.

  So a checkpoint saved at a preemption replaces no regular one.
  """

  count: int
  is_regular: Callable[[int], bool]

  def should_preserve(
    self,
    checkpoints: Sequence[Any],
    *,
    context: preservation_policy.PreservationContext,
  ) -> Sequence[bool]:
    """Returns a flag for each checkpoint, in the order of their steps."""
    del context
    regular = [each.step for each in checkpoints if self.is_regular(each.step)]
    last = [each.step for each in checkpoints][-1:]
    kept = {*regular[-self.count :], *last}
    return [each.step in kept for each in checkpoints]
