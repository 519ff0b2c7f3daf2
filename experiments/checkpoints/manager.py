"""The manager of a run's checkpoints: which are kept, and where."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

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
  read_only: bool = False,
) -> Iterator[ocp.CheckpointManager]:
  """Opens the checkpoints of a run; at the end it waits for saves.

  Args:
    workdir: the run's directory.
    keep_last: number of last checkpoints kept.
    keep_best: number of best ones kept besides.
    best_metric: decides which is best.
    read_only: whether only to restore.

  Yields:
    An Orbax manager, which saves asynchronously.

  Raises:
    UserError: if no checkpoint can be read, or, read-only, if one cannot; if
      the last one cannot be saved.

  Example:
    >>> with opened(Path("runs/reverse")) as manager:  # doctest: +SKIP
    ...   restored = restore_last(manager, like)
  """
  rank = functools.partial(goodness, best_metric)
  folder = workdir.absolute() / FOLDER
  first_process_only(
    functools.partial(check_listing, folder, best_metric, read_only=read_only)
  )
  policy = preservation_policy.AnyPreservationPolicy(
    [
      preservation_policy.LatestN(keep_last),
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
    # What several processes close waits for all of them, dead ones too.
    if jax.process_count() == 1:
      with contextlib.suppress(Exception):
        manager.close()
    raise
  with saving(manager):
    manager.close()
