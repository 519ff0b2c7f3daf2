"""Evaluates a run on one of its sets, from its directory alone.

    python -m experiments.evaluate --workdir=runs/reverse --split=test

Prints metrics and a table by length; writes eval/<split>.json and
figures/alignments.png.
"""

from pathlib import Path

from absl import flags

from experiments import cli

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The run's directory.", required=True
)
_SPLIT = flags.DEFINE_string("split", "test", "The set to evaluate.")
_CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "last", "Which checkpoint: last, best or a step."
)


def main() -> None:
  """Evaluates, as the flags say."""
  workdir = Path(_WORKDIR.value)
  cli.set_up_jax()
  import jax

  from experiments import inference, report, runs

  run, state = inference.restore(workdir, _CHECKPOINT.value)
  split = _SPLIT.value
  evaluation = inference.evaluate(run, state, split)
  examples = runs.evaluation_set(run, split)
  picture = report.draw_alignments(workdir, run, state, examples)
  if jax.process_index() == 0:
    step = int(state.step)
    text = report.write_evaluation(workdir, split, step, evaluation)
    print(f"{text}\n\nalignments: {picture}")


if __name__ == "__main__":
  cli.run(main)
