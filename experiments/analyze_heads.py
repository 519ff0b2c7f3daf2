"""Prunes the heads of a trained Transformer, one at a time.

    python -m experiments.analyze_heads --workdir=RUN --split=test

Prints the loss without each head, and the metric that chose the checkpoint;
leaves them in eval/<set>_heads.json and figures/heads_<set>.png.
"""

from pathlib import Path
from typing import Any

from absl import flags

from experiments import cli
from experiments.distributed import initialize

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The run's directory.", required=True
)
_SPLIT = flags.DEFINE_string("split", "validation", "The set to look at.")
_CHECKPOINT = cli.define_checkpoint()


def main() -> None:
  """Prunes and tells, as the flags say."""
  workdir = Path(_WORKDIR.value)
  initialize.set_up_jax()
  import jax

  from experiments import progress
  from experiments.inference import head_pruning, restored
  from experiments.run_directory import write_json

  finished = restored.restore(workdir, _CHECKPOINT.value)
  name, examples = restored.examples(finished.run, _SPLIT.value)
  with progress.counting("heads") as done:
    worths = head_pruning.worth_of_heads(
      finished.run, finished.params, examples, done
    )
  if jax.process_index() != 0:
    return
  told: dict[str, Any] = {"checkpoint": finished.used}
  for metric, worth in worths.items():
    print(f"{name}: {metric} {worth.whole:.4f}; without a head of")
    for kind, layers in worth.without.items():
      for layer, row in enumerate(layers, start=1):
        values = "  ".join(f"{value:8.4f}" for value in row)
        print(f"{kind:<24} layer {layer}: {values}")
    without = {kind: rows.tolist() for kind, rows in worth.without.items()}
    told[metric] = {"whole": worth.whole, "without": without}
  write_json(workdir / "eval" / f"{name}_heads.json", told)
  picture = workdir / "figures" / f"heads_{name}.png"
  head_pruning.save_picture(worths, picture)
  print(f"\nheads: {picture}")


if __name__ == "__main__":
  cli.run(main)
