"""Measures import and start-up times.

    python -m benchmarks.startup [--runs=5]

Prints medians over processes: `--help`; `import attention` minus `import jax`;
and the time from the command `python -m experiments.train
--config=configs/reverse.py` to the end of the first step, with an empty and
with a filled compilation cache.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from experiments import cli

_RUNS = flags.DEFINE_integer(
  "runs", 5, "Processes per measurement.", lower_bound=1
)


def seconds(*command: str) -> float:
  """The duration of a Python process."""
  begin = time.perf_counter()
  subprocess.run(
    [sys.executable, *command], check=False, stdout=subprocess.DEVNULL
  )
  return time.perf_counter() - begin


def seconds_to_first_step(cache: str) -> float:
  """The time from the training command until its first step is logged."""
  with tempfile.TemporaryDirectory() as folder:
    timings = pathlib.Path(folder) / "timings.jsonl"
    begin = time.perf_counter()
    process = subprocess.Popen(
      [
        sys.executable,
        "-m",
        "experiments.train",
        "--config=configs/reverse.py",
        f"--workdir={folder}",
      ],
      env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    try:
      while not (timings.exists() and timings.stat().st_size):
        if process.poll() is not None:
          raise RuntimeError("training ended before its first step")
        time.sleep(0.01)
      return time.perf_counter() - begin
    finally:
      process.kill()
      process.wait()


def main() -> None:
  """Prints a table."""
  runs = range(_RUNS.value)
  help_ = [seconds("-m", "experiments.train", "--help") for _ in runs]
  jax = [seconds("-c", "import jax") for _ in runs]
  ours = [seconds("-c", "import jax, attention") for _ in runs]
  attend = [seconds("-c", "import jax; from attention import *") for _ in runs]
  cold = []
  for _ in runs:
    with tempfile.TemporaryDirectory() as cache:
      cold.append(seconds_to_first_step(cache))
  with tempfile.TemporaryDirectory() as cache:
    seconds_to_first_step(cache)
    warm = [seconds_to_first_step(cache) for _ in runs]
  rows = {
    "python -m experiments.train --help": help_,
    "import jax": jax,
    "import attention, minus import jax": [
      statistics.median(ours) - statistics.median(jax)
    ],
    "all its public names, minus import jax": [
      statistics.median(attend) - statistics.median(jax)
    ],
    "command to first step, empty cache": cold,
    "command to first step, warm cache": warm,
  }
  print(f"{'':<44}{'median s':>9}{'min':>8}{'max':>8}")
  for name, each in rows.items():
    print(
      f"{name:<44}{statistics.median(each):>9.2f}{min(each):>8.2f}"
      f"{max(each):>8.2f}"
    )


if __name__ == "__main__":
  cli.run(main)
