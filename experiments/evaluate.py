r"""Evaluates a trained run on one of its evaluation sets, or on two files.

    python -m experiments.evaluate --workdir=runs/reverse --split=test
    python -m experiments.evaluate --workdir=runs/multi30k --beam_size=5 \
        --source=test.en --target=test.de

Prints metrics and a table by length; writes eval/<set>.json, the predictions
as eval/<set>.txt, and figures/alignments_<set>.png. If flags differ from the
config of the run, names tell how, as in eval/<set>_beam_5.json.
"""

from pathlib import Path

from absl import flags

from experiments import cli
from experiments.config import EvaluationConfig
from experiments.distributed import initialize
from experiments.errors import UserError
from experiments.run_directory import check_results, run_path

_WORKDIR, _CHECKPOINT = cli.define_run()
_SPLIT = flags.DEFINE_string("split", "test", "The set to evaluate.")
_SOURCE = flags.DEFINE_string(
  "source", None, "A source file to evaluate instead; needs --target."
)
_TARGET = flags.DEFINE_string(
  "target", None, "The references of --source, line by line."
)
_BEAM_SIZE, _LENGTH_PENALTY = cli.define_search()


def _variant(config: EvaluationConfig) -> str:
  """The end of file names: the flags that differ from the run's config."""
  flags_and_fields = (
    ("beam", _BEAM_SIZE.value, config.beam_size),
    ("penalty", _LENGTH_PENALTY.value, config.length_penalty),
    ("checkpoint", _CHECKPOINT.value, config.checkpoint),
  )
  return "".join(
    f"_{name}_{value}".replace(":", "_")
    for name, value, configured in flags_and_fields
    if value not in (None, configured)
  )


def main() -> None:
  """Evaluates the run that the flags name."""
  files = [str(Path(x).resolve()) for x in (_SOURCE.value, _TARGET.value) if x]
  if files and _SPLIT.present:
    raise UserError(
      f"--split={_SPLIT.value}: has no effect with --source and --target; leave"
      " out --split, or both of them"
    )
  workdir = run_path(_WORKDIR.value)
  initialize.set_up_jax()
  import jax

  from experiments import inference
  from experiments.evaluation import report
  from experiments.evaluation.search import configured_search
  from experiments.visualization.alignments import draw_alignments

  restored = inference.restore(workdir, _CHECKPOINT.value)
  search = configured_search(
    restored.experiment,
    beam_size=_BEAM_SIZE.value,
    length_penalty=_LENGTH_PENALTY.value,
  )
  name, examples = inference.evaluation_set(
    restored.experiment, _SPLIT.value, _SOURCE.value, _TARGET.value
  )
  config = restored.experiment.config.evaluation
  variant = _variant(config)
  if jax.process_index() == 0:
    check_results(workdir)
    report.check_files(workdir, f"{name}{variant}", files)
  evaluation = inference.evaluate(restored, examples, search)
  if jax.process_index() == 0:
    described = report.described(name, restored.checkpoint, evaluation)
    print(described, flush=True)
    written = report.write_evaluation(
      *(workdir, name, restored.checkpoint, evaluation),
      config=config,
      variant=variant,
      files=files,
    )
    print(f"\nresults: {written}", flush=True)
  figure = draw_alignments(
    workdir, name + variant, restored.experiment, restored.params, examples
  )
  if jax.process_index() == 0:
    print(f"alignments: {figure}")


if __name__ == "__main__":
  cli.run(main)
