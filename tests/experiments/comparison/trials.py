"""Trials of a tiny config, and the files that training one would write."""

import json
from pathlib import Path

import numpy as np

from experiments.comparison import grid
from experiments.visualization import plots
from tests.experiments.conftest import make_tiny


def make_trials(sweeps, folder=Path("c"), num_seeds=1, config=None):
  return grid.make_trials(
    config or make_tiny(),
    sweeps,
    num_seeds=num_seeds,
    folder=folder,
    flags=["--config=tiny.py"],
  )


def write_results(
  trial, accuracy, *, beam_size=1, longest=4, train_metric="loss"
):
  """Writes the files of a trained and evaluated trial."""
  for split in trial.splits:
    path = trial.workdir / "eval" / f"{split}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    row = {"length": 1, "to_length": longest, "sequence_accuracy": accuracy}
    metrics = {"sequence_accuracy": accuracy, "loss": 1 - accuracy}
    if trial.group != "none":
      metrics["alignment_error_rate"] = 0.95 - accuracy
    written = {"metrics": metrics, "by_length": [row], "parameters": 1000}
    written["search"] = {"beam_size": beam_size}
    path.write_text(json.dumps(written))
  lines = [
    {"step": 12, "split": "train", train_metric: 0.5},
    {"step": 12, "split": "validation", "sequence_accuracy": accuracy},
  ]
  text = "".join(f"{json.dumps(line)}\n" for line in lines)
  (trial.workdir / "metrics.jsonl").write_text(text)
  line = {"step": 12, "split": "train", "seconds": 60.0}
  line |= {"step_milliseconds": 2.5, "peak_memory": 2**30}
  (trial.workdir / "timings.jsonl").write_text(json.dumps(line) + "\n")
  (trial.workdir / "config.json").write_text(json.dumps(trial.raw))
  weights = (trial.group != "none") * np.array([[0.8, 0.2], [0.4, 0.6]])
  panel = plots.AttentionPanel(weights, ["a", "b"], ["b", "a"], "")
  plots.save_attention_weights([panel], trial.attention_weights)
