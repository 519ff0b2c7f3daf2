"""The cores of this machine that a process may use."""

import os


def num_cores() -> int:
  """The number of cores; fewer than the machine has under Slurm or `taskset`.

  Example:
    >>> num_cores() >= 1
    True
  """
  if hasattr(os, "sched_getaffinity"):  # not on macOS
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
