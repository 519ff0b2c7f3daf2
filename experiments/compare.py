r"""Compares values of fields of a config, over several seeds.

    python -m experiments.compare --config=configs/reverse.py \
        --config.train.steps=2500 --scores=none,dot,general,additive \
        --seeds=5 --workdir=runs/scores
    python -m experiments.compare --config=configs/reverse.py \
        --sweep=model.input_feeding=true,false --workdir=runs/feeding

Trains every combination of values with every seed. Writes report.md, figures/,
results.csv, curves.csv and by_length.csv. The same command resumes; with more
seeds or values it trains only the missing trials.
"""

import shlex
import sys
from pathlib import Path

from absl import flags, logging

from experiments import cli
from experiments.config import flag
from experiments.errors import UserError
from experiments.run_directory import CONFIG, is_remote

_CONFIG = cli.define_config()
_SCORES = flags.DEFINE_list(
  "scores",
  None,
  "Scores to compare: dot, scaled_dot, general, additive, concat, cosine; for"
  " an RNN also none, location, local_m and local_p; for a Transformer also"
  " location, local_m, local_p, shaw, disentangled, transformer_xl and"
  " forgetting.",
)
_SWEEP = flags.DEFINE_multi_string(
  "sweep",
  [],
  "A field and its values, FIELD=VALUE,VALUE. If the flag is repeated, all"
  " combinations are trained.",
)
_SEEDS = flags.DEFINE_integer(
  "seeds", 3, "Number of seeds of each combination.", lower_bound=1
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Directory of the comparison.", required=True
)
_JOBS = flags.DEFINE_integer(
  "jobs",
  1,
  "Number of trials trained at the same time. Each trial uses all cores, so"
  " times are comparable only with 1. On GPUs and TPUs only 1 is possible,"
  " because each trial uses all devices and their memory.",
  lower_bound=1,
)


def main() -> int | None:
  """Trains the incomplete trials and writes the report."""
  from experiments.comparison import grid, report, results, runner

  config, folder = _CONFIG.value, _folder()
  trials = grid.make_trials(
    config,
    _sweeps(config),
    num_seeds=_SEEDS.value,
    folder=folder,
    flags=flag.config_arguments(),
  )
  others = grid.other_runs(trials, folder)
  if further := grid.further_seeds(trials, others):
    logging.warning(
      "--seeds=%d: the report leaves out %s, trained with more seeds; to keep"
      " these runs in it, stop and give their number of seeds",
      _SEEDS.value,
      ", ".join(further),
    )
  found, failed = results.read_all(runner.run(trials, _JOBS.value))
  if not found.trials:
    errors = [f"{trial.name}: {error}" for trial, error in failed]
    raise UserError(
      "\n  ".join(["every trial failed, so no report is written:", *errors])
    )
  path = report.write(
    found,
    failed,
    folder,
    command=shlex.join(["python", "-m", "experiments.compare", *sys.argv[1:]]),
    metric=config.train.best_metric,
    others=others,
  )
  print(path.read_text(encoding="utf-8"), f"report: {path}", sep="\n")
  return 1 if failed else None


def _folder() -> Path:
  folder = Path(_WORKDIR.value)
  if is_remote(_WORKDIR.value):
    raise UserError(
      f"--workdir={_WORKDIR.value}: a comparison needs a local directory, in"
      " which its trials write logs; copy it to the bucket afterwards"
    )
  if (folder / CONFIG).exists():
    raise UserError(
      f"--workdir={folder}: is the run directory of one training; a comparison"
      " needs a directory of its own"
    )
  return folder


def _sweeps(config) -> dict[str, list[str]]:
  """The swept fields and their values, as text."""
  from experiments.comparison import grid

  sweeps = [grid.parse_sweep(text) for text in _SWEEP.value]
  if _SCORES.value:
    sweeps.insert(0, (grid.score_field(config), _SCORES.value))
  if not sweeps:
    raise UserError(
      "nothing to compare: give --scores=none,dot,... or"
      " --sweep=FIELD=VALUE,VALUE; see --help"
    )
  if len(dict(sweeps)) < len(sweeps):
    fields = ", ".join(field for field, _ in sweeps)
    raise UserError(
      f"a field is swept twice: {fields}; give all values of a field in one"
      " flag"
    )
  return dict(sweeps)


if __name__ == "__main__":
  cli.run(main, needs_config=True)
