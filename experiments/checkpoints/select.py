"""Selects checkpoints by name: the last, the best, or a step."""

import itertools
from collections.abc import Callable, Mapping

import orbax.checkpoint as ocp
from absl import logging

from experiments.errors import UserError

_LOWER_IS_BETTER = ("loss", "perplexity")


def choose(
  manager: ocp.CheckpointManager,
  which: str,
  *,
  best_metric: str = "loss",
  is_regular: Callable[[int], bool] | None = None,
) -> list[int]:
  """Returns the steps that a name stands for; the last or best one last.

  `which` is "last", "best", or a step; "last:3" and "best:3" stand for up to
  three. With `is_regular` (whether an uninterrupted run saves at a step),
  "last:3" means the last three regular steps: neither a checkpoint saved at a
  preemption nor an old one that was kept because it is the best counts.
  """
  steps = sorted(manager.all_steps())
  name, colon, number = which.partition(":")
  count = int(number) if number.isdecimal() else 1
  chosen: list[int] = []
  if name == "last" and colon and count and is_regular:
    chosen = _last_regular(steps, count, is_regular)
  elif name == "last":
    chosen = steps[-count:]
  elif name == "best":
    scores = {step: manager.metrics(step) for step in steps}
    ranked = [step for step in steps if scores[step]]
    ranked.sort(key=lambda step: goodness(best_metric, scores[step]))
    chosen = ranked[-count:]
  elif which.isdecimal() and int(which) in steps:
    chosen = [int(which)]
  if not (count and chosen) or (colon and not number.isdecimal()):
    raise UserError(
      f"{manager.directory}: no checkpoint {which!r}; there are"
      f" {', '.join(map(str, steps)) or 'none'}"
    )
  return chosen


def _last_regular(
  steps: list[int], count: int, is_regular: Callable[[int], bool]
) -> list[int]:
  """Returns those of the last `count` regular steps that have a checkpoint."""
  regular = [step for step in steps if is_regular(step)]
  if not regular:
    return steps[-1:]
  expected = list(
    itertools.islice(filter(is_regular, range(regular[-1], 0, -1)), count)
  )
  chosen = [step for step in regular if step >= expected[-1]]
  if len(chosen) < len(expected):
    logging.warning(
      "last:%d: only %d of the last %d checkpoints were kept"
      " (config.train.keep_last)",
      count,
      len(chosen),
      len(expected),
    )
  return chosen


def goodness(
  best_metric: str, metrics: Mapping[str, float]
) -> tuple[float, float]:
  """Returns a sort key: larger for better, then for earlier checkpoints."""
  value = metrics[best_metric]
  earlier = -metrics.get("step", 0)
  return -value if best_metric in _LOWER_IS_BETTER else value, earlier
