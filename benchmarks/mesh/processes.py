"""Runs a measurement in a process with its own number of devices."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def measure(name: str, *, devices: int = 1) -> dict[str, Any]:
  """Runs a module of this package on simulated devices; its results."""
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


def print_results(measurement: Callable[[], dict[str, Any]]) -> None:
  """Sets JAX up as for training, and prints the results for `measure`."""
  from experiments.distributed import initialize

  initialize.set_up_jax()
  print(json.dumps(measurement()))
