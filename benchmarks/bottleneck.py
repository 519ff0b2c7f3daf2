"""Draws docs/results/bottleneck.png: accuracy with a fixed context vector.

    python -m benchmarks.bottleneck

Shows accuracy on the reverse task by length, with and without attention, from
docs/results/tasks.json, which `python -m benchmarks.synthetic_tasks --write`
writes.
"""

import json
import pathlib

from experiments import cli
from experiments.visualization import plots

_RESULTS = pathlib.Path("docs/results")
_CURVES = {
  "additive attention": "configs/reverse.py",
  "fixed context vector": "configs/reverse.py:none",
  "Transformer": "configs/reverse.py:transformer",
}


def main() -> None:
  """Draws the figure."""
  results = json.loads((_RESULTS / "tasks.json").read_text())
  curves = {}
  for name, config in _CURVES.items():
    splits = results[config][0]["splits"]
    curves[name] = [
      *splits["test"]["by_length"],
      *splits["test_26_to_30"]["by_length"],
    ]
  plots.save_accuracy_by_length(
    curves,
    _RESULTS / "bottleneck.png",
    trained_length=25,
    title="reverse: accuracy with and without attention",
  )


if __name__ == "__main__":
  cli.run(main)
