"""Trains the synthetic tasks, and measures total time and accuracy.

    python -m benchmarks.synthetic_tasks [--configs=A.py,B.py] [--runs=1]

Each row is one process of `experiments.train` with an empty compilation cache:
its duration and its final metrics. `--write` replaces the results of these
configs in `docs/results/tasks.json`.
"""

import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from experiments import cli

_CONFIGS = flags.DEFINE_list(
  "configs",
  [
    "configs/reverse.py",
    "configs/reverse.py:none",
    "configs/reverse.py:transformer",
    "configs/copy.py",
    "configs/lookup.py",
  ],
  "Configs to train.",
)
_RUNS = flags.DEFINE_integer("runs", 1, "Seeds per config.", lower_bound=1)
_WRITE = flags.DEFINE_bool(
  "write", False, "Write the results to docs/results/tasks.json."
)

_RESULTS = pathlib.Path("docs/results/tasks.json")


def measure(config: str, seed: int) -> dict:
  """Trains a config in a process; its duration and evaluation results."""
  with tempfile.TemporaryDirectory() as folder:
    workdir = pathlib.Path(folder) / "run"
    begin = time.perf_counter()
    subprocess.run(
      [
        sys.executable,
        "-m",
        "experiments.train",
        f"--config={config}",
        f"--config.seed={seed}",
        f"--workdir={workdir}",
      ],
      check=True,
      env={**os.environ, "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"},
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - begin
    splits = {
      path.stem: json.loads(path.read_text())
      for path in sorted((workdir / "eval").glob("*.json"))
    }
  return {"seed": seed, "seconds": seconds, "splits": splits}


def main() -> None:
  """Prints a table for each config, and writes the results on request."""
  results = {}
  for config in _CONFIGS.value:
    results[config] = [measure(config, seed) for seed in range(_RUNS.value)]
    runs = results[config]
    seconds = statistics.median(run["seconds"] for run in runs)
    print(f"{config}: {seconds:.0f} s (median of {len(runs)})")
    for split in runs[0]["splits"]:
      medians = [
        statistics.median(run["splits"][split]["metrics"][name] for run in runs)
        for name in ("sequence_accuracy", "token_accuracy", "bleu")
      ]
      print(
        f"  {split:<16} sequences {medians[0]:8.2%}  tokens {medians[1]:8.2%}"
        f"  BLEU {medians[2]:6.2f}",
        flush=True,
      )
  if _WRITE.value:
    _RESULTS.parent.mkdir(parents=True, exist_ok=True)
    stored = json.loads(_RESULTS.read_text()) if _RESULTS.exists() else {}
    _RESULTS.write_text(json.dumps(stored | results, indent=1) + "\n")


if __name__ == "__main__":
  cli.run(main)
