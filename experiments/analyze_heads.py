"""Evaluates a trained Transformer with each of its heads removed in turn.

    python -m experiments.analyze_heads --workdir=RUN --split=test

Prints the loss and the config's train.best_metric without each head; writes
eval/<set>_heads.json and figures/heads_<set>.png.
"""

from typing import Any

from absl import flags

from experiments import cli
from experiments.distributed import initialize
from experiments.run_directory import check_results, run_path, write_json

_WORKDIR, _CHECKPOINT = cli.define_run()
_SPLIT = flags.DEFINE_string("split", "validation", "The evaluation set.")


def main() -> None:
  """Prunes every head of a run, and writes the results."""
  workdir = run_path(_WORKDIR.value)
  initialize.set_up_jax()
  import jax

  from experiments import inference, progress
  from experiments.inference import head_pruning

  restored = inference.restore(workdir, _CHECKPOINT.value)
  name, examples = inference.evaluation_set(restored.experiment, _SPLIT.value)
  if jax.process_index() == 0:
    check_results(workdir)
  with progress.counting("heads") as done:
    results = head_pruning.prune_heads(
      restored.experiment, restored.params, examples, done
    )
  if jax.process_index() != 0:
    return
  summary: dict[str, Any] = {"checkpoint": restored.checkpoint}
  for metric, result in results.items():
    print(f"{name}: {metric} {result.whole:.4f}; without each head:")
    for kind, layers in result.without.items():
      for layer, row in enumerate(layers, start=1):
        values = "  ".join(f"{value:8.4f}" for value in row)
        print(f"{kind:<24} layer {layer}: {values}")
    without = {kind: rows.tolist() for kind, rows in result.without.items()}
    summary[metric] = {"whole": result.whole, "without": without}
  write_json(workdir / "eval" / f"{name}_heads.json", summary)
  figure = workdir / "figures" / f"heads_{name}.png"
  title = f"{restored.experiment.config.title}, {name}"
  head_pruning.save_figure(results, figure, title)
  print(f"\nheads: {figure}")


if __name__ == "__main__":
  cli.run(main)
