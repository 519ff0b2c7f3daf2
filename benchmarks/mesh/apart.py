"""A part of the benchmark in a process of its own, with devices of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def measured(name: str, *, devices: int = 1) -> dict[str, Any]:
  """What a module of this folder measures.

  Args:
    name: of the module, whose main program is `report`.
    devices: how many simulated ones it sees.

  Returns:
    What it has reported.

  Raises:
    RuntimeError: if it fails; with what it said.

  Example:
    >>> measured("step")["ratio"]  # doctest: +SKIP
    0.999
  """
  flag = f"--xla_force_host_platform_device_count={devices}"
  done = subprocess.run(
    [sys.executable, "-m", f"benchmarks.mesh.{name}"],
    env={**os.environ, "XLA_FLAGS": flag},
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode:
    raise RuntimeError(done.stderr)
  return json.loads(done.stdout.splitlines()[-1])


def report(measure: Callable[[], dict[str, Any]]) -> None:
  """Measures with JAX set up as for a run, and tells the process that asked.

  Args:
    measure: gives the figures, by name.

  Example:
    >>> report(dict)  # doctest: +SKIP
    {}
  """
  from experiments.distributed import initialize

  initialize.set_up_jax()
  print(json.dumps(measure()))
