"""Which checkpoints of a run answer: the last, the best, or their mean."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from experiments.checkpoints.restore import restore
from experiments.errors import UserError
from experiments.optimization.step import TrainState

_LOWER_IS_BETTER = ("loss", "perplexity")


def parameters(
  manager: ocp.CheckpointManager,
  which: str,
  like: TrainState,
  *,
  best_metric: str = "loss",
) -> tuple[Any, str]:
  """Restores the parameters to answer with, of one checkpoint or several.

  The mean of a run's last checkpoints is often better than any of them: see
  "Averaging Weights Leads to Wider Optima and Better Generalization", Izmailov
  et al., 2018 (https://arxiv.org/abs/1803.05407).

  Args:
    manager: from `opened`.
    which: as for `choose`.
    like: as for `restore_last`.
    best_metric: decides which is best.

  Returns:
    The parameters, and the steps they come from, for a reader.

  Raises:
    UserError: if there are no such checkpoints, or one cannot be read.

  Example:
    >>> params, used = parameters(manager, "last:10", like)  # doctest: +SKIP
    >>> used  # doctest: +SKIP
    'mean of 10 steps, 7100 to 8000'
  """
  chosen = choose(manager, which, best_metric=best_metric)
  total = None
  for step in chosen:
    state, _ = restore(manager, step, like)
    params = state.evaluated
    total = params if total is None else jax.tree.map(jnp.add, total, params)
  if len(chosen) == 1:
    return total, f"step {chosen[0]}"
  mean = jax.tree.map(lambda leaf: leaf / len(chosen), total)
  return mean, f"mean of {len(chosen)} steps, {min(chosen)} to {max(chosen)}"


def choose(
  manager: ocp.CheckpointManager, which: str, *, best_metric: str = "loss"
) -> list[int]:
  """Returns the steps of checkpoints by name.

  Args:
    manager: from `opened`.
    which: "last", "best", or a step; "last:3" and "best:3" for up to three.
    best_metric: decides which is best.

  Returns:
    The steps, the last or best one last.

  Raises:
    UserError: if there are no such checkpoints.

  Example:
    >>> choose(manager, "last:2")  # doctest: +SKIP
    [400, 500]
  """
  steps = sorted(manager.all_steps())
  name, colon, number = which.partition(":")
  count = int(number) if number.isdecimal() else 1
  found: list[int] = []
  if name == "last":
    found = steps[-count:]
  elif name == "best":
    scores = {step: manager.metrics(step) for step in steps}
    ranked = [step for step in steps if scores[step]]
    ranked.sort(key=lambda step: goodness(best_metric, scores[step]))
    found = ranked[-count:]
  elif which.isdecimal() and int(which) in steps:
    found = [int(which)]
  if not (count and found) or (colon and not number.isdecimal()):
    raise UserError(
      f"{manager.directory}: no checkpoint {which!r}; there are"
      f" {', '.join(map(str, steps)) or 'none'}"
    )
  return found


def goodness(
  best_metric: str, metrics: Mapping[str, float]
) -> tuple[float, float]:
  """Returns what checkpoints are ranked by.

  Args:
    best_metric: decides.
    metrics: of a checkpoint.

  Returns:
    A pair that is larger for better ones.

  Example:
    >>> goodness("loss", {"loss": 0.5}) > goodness("loss", {"loss": 0.7})
    True
  """
  value = metrics[best_metric]
  # Of equal ones the first is better: training on has gained nothing.
  earlier = -metrics.get("step", 0)
  return -value if best_metric in _LOWER_IS_BETTER else value, earlier
