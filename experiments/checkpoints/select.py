"""Selects checkpoints by name: the last, the best, or a step."""

import re
from collections.abc import Mapping

from absl import logging

from experiments.checkpoints.storage import Manager
from experiments.config import TrainConfig
from experiments.errors import UserError

_LOWER_IS_BETTER = ("loss",)
_NAMES = "last, best, last:N, best:N or a step"


def choose(manager: Manager, which: str, config: TrainConfig) -> list[int]:
  """Returns the steps that "last", "best:3" or "100" selects, worst first."""
  steps = sorted(manager.all_steps())
  parsed = re.fullmatch("(last|best)(:[1-9][0-9]*)?", which)
  step = int(which) if re.fullmatch("[0-9]+", which) else None
  name, number = parsed.groups() if parsed else (None, None)
  count = int((number or ":1")[1:])
  if name == "best":
    scores = {step: manager.metrics(step) for step in steps}
    ranked = [step for step in steps if scores[step]]
    ranked.sort(key=lambda step: goodness(config.best_metric, scores[step]))
    chosen = ranked[-count:]
  elif number:
    chosen = _last_regular(steps, count, config)
  else:
    chosen = steps[-1:] if name else [each for each in steps if each == step]
  if not chosen:
    is_name = parsed or step is not None
    reason = f"not in {manager.folder}" if is_name else f"must be {_NAMES}"
    raise UserError(
      f"--checkpoint={which}: {reason}; saved steps:"
      f" {', '.join(map(str, steps)) or 'none'}"
    )
  return chosen


def _last_regular(
  steps: list[int], count: int, config: TrainConfig
) -> list[int]:
  """Returns those of the last `count` regular steps that have a checkpoint."""
  # A checkpoint saved at a preemption is not regular.
  regular = [step for step in steps if config.saves_at(step)]
  if not regular:
    return steps[-1:]
  expected = list(filter(config.saves_at, range(1, regular[-1] + 1)))[-count:]
  chosen = [step for step in regular if step in expected]
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
