r"""Evaluates a run on one of its sets, or on files, from its directory alone.

    python -m experiments.evaluate --workdir=runs/reverse --split=test
    python -m experiments.evaluate --workdir=runs/multi30k --beam_size=5 \
        --source=test.en --target=test.de

Prints metrics and a table by length; writes eval/<set>.json, the answers as
eval/<set>.txt, and figures/alignments_<set>.png.
"""

from pathlib import Path

from absl import flags

from experiments import cli
from experiments.distributed import initialize

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "The run's directory.", required=True
)
_SPLIT = flags.DEFINE_string("split", "test", "The set to evaluate.")
_SOURCE = flags.DEFINE_string(
  "source", None, "A file to translate, in place of a set; needs --target."
)
_TARGET = flags.DEFINE_string(
  "target", None, "The file's translation, line by line."
)
_CHECKPOINT = cli.define_checkpoint()
_BEAM_SIZE, _LENGTH_PENALTY = cli.define_search()


def main() -> None:
  """Evaluates, as the flags say."""
  workdir = Path(_WORKDIR.value)
  initialize.set_up_jax()
  import jax

  from experiments.evaluation import report
  from experiments.inference import restored

  finished = restored.restore(workdir, _CHECKPOINT.value)
  search = restored.configured_search(
    finished.run,
    beam_size=_BEAM_SIZE.value,
    length_penalty=_LENGTH_PENALTY.value,
  )
  name, examples = restored.examples(
    finished.run, _SPLIT.value, _SOURCE.value, _TARGET.value
  )
  evaluation = restored.evaluate(finished, examples, search)
  if jax.process_index() == 0:
    print(report.described(name, evaluation), flush=True)
    report.write_evaluation(workdir, name, finished.used, evaluation)
  picture = report.draw_alignments(
    workdir, name, finished.run, finished.params, examples
  )
  if jax.process_index() == 0:
    print(f"\nalignments: {picture}")


if __name__ == "__main__":
  cli.run(main)
