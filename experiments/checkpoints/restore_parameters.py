"""Restores parameters, without the optimizer state, of chosen checkpoints."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from experiments.checkpoints.content import ITEMS, arrays
from experiments.checkpoints.digests import of_arrays
from experiments.checkpoints.restore import (
  agreement,
  check_digests,
  reader_options,
)
from experiments.checkpoints.select import choose
from experiments.optimization.step import TrainState


def parameters(
  manager: ocp.CheckpointManager,
  which: str,
  like: TrainState,
  *,
  best_metric: str = "loss",
  is_regular: Callable[[int], bool] | None = None,
  in_memory: Mapping[int, Any] | None = None,
) -> tuple[Any, str]:
  """Restores the parameters to evaluate: of one checkpoint, or their mean.

  The mean of a run's last checkpoints is often better than any of them: see
  "Averaging Weights Leads to Wider Optima and Better Generalization", Izmailov
  et al., 2018 (https://arxiv.org/abs/1803.05407).

  Args:
    manager: from `opened`.
    which: as for `choose`.
    like: a state, or an abstract state with shardings.
    best_metric: as for `choose`.
    is_regular: as for `choose`.
    in_memory: parameters by step, which need not be read.

  Returns:
    The parameters (the moving average where there is one), and a description
    of their steps.

  Raises:
    UserError: if there are no such checkpoints, or one cannot be read.
  """
  chosen = choose(
    manager, which, best_metric=best_metric, is_regular=is_regular
  )
  total = None
  for step in chosen:
    if step in (in_memory or {}):
      params = (in_memory or {})[step]
    else:
      params = _restore(manager, step, like)
    total = params if total is None else jax.tree.map(jnp.add, total, params)
  if len(chosen) == 1:
    return total, f"step {chosen[0]}"
  mean = jax.tree.map(lambda leaf: leaf / len(chosen), total)
  return mean, f"mean of {len(chosen)} steps, {min(chosen)} to {max(chosen)}"


def _restore(
  manager: ocp.CheckpointManager, step: int, like: TrainState
) -> Any:
  """Restores the parameters of one checkpoint, and checks their digests."""
  name = "params" if like.average is None else "average"
  folder = Path(manager.directory) / str(step)
  with agreement(folder):
    restored = _read(folder, {name: arrays(like)[name]})
  digests = restored["digests"]
  with agreement(folder):
    found = of_arrays(restored["state"])
    # Orbax leaves arrays that the checkpoint lacks as they were in `like`.
    saved = {each for each in digests if each.startswith(f"{name}/")}
    if saved and saved != found.keys():
      different = min(saved ^ found.keys())
      raise ValueError(f"structures do not match: {different}")
    check_digests(found, digests)
  return restored["state"][name]


def _read(folder: Path, like: Mapping[str, Any]):
  """Reads these arrays alone, in a manager of this process."""
  args = ocp.args.Composite(
    state=ocp.args.PyTreeRestore(
      like,
      restore_args=ocp.checkpoint_utils.construct_restore_args(like),
      partial_restore=True,
    ),
    digests=ocp.args.JsonRestore(),
  )
  with ocp.CheckpointManager(
    folder.parent, options=reader_options(), item_names=ITEMS
  ) as reader:
    return reader.restore(int(folder.name), args=args)
