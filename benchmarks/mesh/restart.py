"""Time from a resuming command to its first step, compilation cache filled."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_STEPS_FOR_ALL_SHAPES = 400  # after which every batch shape is compiled
_STEPS_BETWEEN = 20


def measure(data: str) -> dict[str, float]:
  """Seconds to the first step of configs/multi30k.py, for three restarts."""
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
    _seconds_to_first_step(command, env, run, _STEPS_FOR_ALL_SHAPES)
    seconds = [
      _seconds_to_first_step(command, env, run, _STEPS_BETWEEN)
      for _ in range(3)
    ]
  return {"median": statistics.median(seconds), "worst": max(seconds)}


def _seconds_to_first_step(command, env, run: Path, num_steps: int) -> float:
  """Starts training, and kills it once it has saved `num_steps` more steps."""
  before, seconds = _last_saved(run), None
  begin = time.perf_counter()
  process = subprocess.Popen(
    command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
  )
  while process.poll() is None and _last_saved(run) < before + num_steps:
    if seconds is None and _has_logged_first(run, before + 1):
      seconds = time.perf_counter() - begin
    time.sleep(0.02)
  process.kill()
  process.wait()
  if seconds is None:
    raise RuntimeError("training ended before its first step")
  return seconds


def _last_saved(run: Path) -> int:
  names = (path.name for path in run.glob("checkpoints/[0-9]*"))
  return max((int(name) for name in names if name.isdecimal()), default=0)


def _has_logged_first(run: Path, step: int) -> bool:
  """Whether timings.jsonl has this step as the first of a process."""
  path = run / "timings.jsonl"
  lines = path.read_text().splitlines() if path.exists() else []
  rows = [json.loads(line) for line in lines if line.endswith("}")]
  return any(r.get("first_step_seconds") and r["step"] == step for r in rows)
