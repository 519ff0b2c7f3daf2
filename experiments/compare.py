r"""Compares scores, or any fields of a config, with seeds and intervals.

    python -m experiments.compare --config=configs/reverse.py \
        --scores=none,dot,general,additive --seeds=5 --workdir=runs/scores
    python -m experiments.compare --config=configs/reverse.py \
        --sweep=model.input_feeding=true,false --workdir=runs/feeding

Trains a run for every combination and seed, in a process and a directory of
its own, and leaves report.md, results.csv, curves.csv, by_length.csv and
figures/. Given again, the same command goes on where it stands; more seeds or
values add to what is there, and fewer leave theirs out of the report.
"""

import shlex
import sys
from pathlib import Path

from absl import flags

from experiments import cli

_CONFIG = cli.define_config()
_SCORES = flags.DEFINE_list(
  "scores",
  None,
  "Scores to compare: none, dot, scaled_dot, general, additive, concat, cosine"
  " (of a Transformer's heads all but none).",
)
_SWEEP = flags.DEFINE_multi_string(
  "sweep",
  [],
  "A field and its values, FIELD=VALUE,VALUE; may be given again, for all"
  " combinations.",
)
_SEEDS = flags.DEFINE_integer(
  "seeds", 3, "Runs of each combination.", lower_bound=1
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "Where the comparison is kept.", required=True
)
_JOBS = flags.DEFINE_integer(
  "jobs",
  1,
  "Runs at a time. Each uses all cores, so that times are true with one alone;"
  " on GPUs and TPUs each takes all devices and their memory: leave it at 1.",
  lower_bound=1,
)


def main() -> int | None:
  """Trains what is missing and writes the report, as the flags say."""
  from experiments.comparison import grid, report, results, runner
  from experiments.errors import UserError

  config, folder = _CONFIG.value, Path(_WORKDIR.value)
  listed = [grid.parse_sweep(text) for text in _SWEEP.value]
  if _SCORES.value:
    listed.insert(0, (grid.score_field(config), _SCORES.value))
  sweeps = dict(listed)
  if len(sweeps) < len(listed):
    fields = " ".join(field for field, _ in listed)
    raise UserError(
      f"to be swept: {fields}; give all values of a field in one flag"
    )
  if not sweeps:
    raise UserError(
      "nothing to compare: give --scores=none,dot,... or"
      " --sweep=FIELD=VALUE,VALUE; see --help"
    )
  cells = grid.grid(
    config,
    sweeps,
    num_seeds=_SEEDS.value,
    folder=folder,
    flags=cli.config_arguments(),
  )
  found, failed = results.read_all(runner.run(cells, _JOBS.value))
  if not found:
    told = [
      f"{one.cell.group}, seed {one.cell.seed}: {one.error}" for one in failed
    ]
    raise UserError(
      "\n  ".join(["every cell failed, so no report is written:", *told])
    )
  path = report.write(
    found,
    failed,
    folder,
    command=shlex.join(["python", "-m", "experiments.compare", *sys.argv[1:]]),
    metric=config.train.best_metric,
    left_out=grid.left_out(cells, folder),
  )
  print(path.read_text(encoding="utf-8"), f"report: {path}", sep="\n")
  return 1 if failed else None


if __name__ == "__main__":
  cli.run(main, config="config")
