"""From a command that resumes to its first step, compiled code in the cache."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_UNTIL_ALL_SHAPES = 400  # steps that meet every shape of a batch
_BETWEEN = 20


def measure(data: str) -> dict[str, float]:
  """Seconds to the first step after a checkpoint, of configs/multi30k.py.

  Args:
    data: the folder of Multi30k.

  Returns:
    The "median" and the "worst" of three restarts.

  Example:
    >>> measure("data/multi30k")["median"]  # doctest: +SKIP
    8.2
  """
  with tempfile.TemporaryDirectory() as folder:
    run = Path(folder) / "run"
    command = [
      *(sys.executable, "-m", "experiments.train"),
      "--config=configs/multi30k.py",
      f"--config.data.dir={data}",
      f"--workdir={run}",
      "--config.train.checkpoint_every=20",
      "--config.train.log_every=1",
    ]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
    _seconds_to_first_step(command, env, run, _UNTIL_ALL_SHAPES)
    seconds = [
      _seconds_to_first_step(command, env, run, _BETWEEN) for _ in range(3)
    ]
  return {"median": statistics.median(seconds), "worst": max(seconds)}


def _seconds_to_first_step(command, env, run: Path, num_steps: int) -> float:
  """Starts the run, lets it save so many steps on, and kills it."""
  before, took = _last_saved(run), None
  begin = time.perf_counter()
  process = subprocess.Popen(
    command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  while process.poll() is None and _last_saved(run) < before + num_steps:
    if took is None and _has_begun(run, before + 1):
      took = time.perf_counter() - begin
    time.sleep(0.02)
  process.kill()
  process.wait()
  if took is None:
    raise RuntimeError("training ended before its first step")
  return took


def _last_saved(run: Path) -> int:
  names = (path.name for path in run.glob("checkpoints/[0-9]*"))
  return max((int(name) for name in names if name.isdecimal()), default=0)


def _has_begun(run: Path, step: int) -> bool:
  """Whether the log has this step as the first of a process."""
  path = run / "timings.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  rows = [json.loads(line) for line in lines if line.endswith("}")]
  return any(r.get("first_step_seconds") and r["step"] == step for r in rows)
