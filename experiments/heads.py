"""Prunes the heads of a trained Transformer, one at a time.

    python -m experiments.heads --workdir=runs/reverse-transformer --split=test

Prints the loss without each head, and leaves it in eval/<set>_heads.json and
figures/heads.png.
"""

from pathlib import Path

from absl import flags

from experiments import cli, runtime

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The run's directory.", required=True
)
_SPLIT = flags.DEFINE_string("split", "validation", "The set to look at.")
_CHECKPOINT = cli.define_checkpoint()


def main() -> None:
  """Prunes and tells, as the flags say."""
  workdir = Path(_WORKDIR.value)
  runtime.set_up_jax()
  import jax

  from experiments import inference, progress, pruning
  from experiments.workdir import write_json

  finished = inference.restore(workdir, _CHECKPOINT.value)
  name, examples = inference.examples(finished.run, _SPLIT.value)
  with progress.counting("heads") as done:
    worth = pruning.worth_of_heads(
      finished.run, finished.params, examples, done
    )
  if jax.process_index() != 0:
    return
  print(f"{name}: loss {worth.whole:.4f}; without a head of")
  for kind, losses in worth.without.items():
    for layer, row in enumerate(losses, start=1):
      told = "  ".join(f"{loss:8.4f}" for loss in row)
      print(f"{kind:<24} layer {layer}: {told}")
  found = {kind: losses.tolist() for kind, losses in worth.without.items()}
  write_json(
    workdir / "eval" / f"{name}_heads.json",
    {"checkpoint": finished.used, "loss": worth.whole, "without": found},
  )
  picture = workdir / "figures" / "heads.png"
  pruning.save_picture(worth, picture)
  print(f"\nheads: {picture}")


if __name__ == "__main__":
  cli.run(main)
