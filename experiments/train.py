r"""Trains an experiment and evaluates it.

    python -m experiments.train --config=configs/reverse.py
    python -m experiments.train --config=configs/reverse.py:dot \
        --config.train.steps=500 --workdir=/tmp/dot

Writes config, metrics, TensorBoard events, checkpoints, evaluations and figures
to the run directory. SIGTERM and Ctrl-C save a checkpoint and stop the run,
with exit code 75; the same command resumes it. Compiled programs are cached in
~/.cache/attention-jax, up to 2 GiB.
"""

from absl import flags

from experiments import cli
from experiments.config import flag, parse
from experiments.distributed import initialize
from experiments.errors import AGAIN
from experiments.run_directory import run_path

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "Directory of the run, or its URL (gs://, s3:// or az://); by default"
  " runs/<config>[-<argument>]. If it contains a run of the same config, this"
  " run is resumed. Fields without effect on the parameters may differ:"
  " evaluation, mesh, train.log_every, train.keep_last and others.",
)
_PROFILE = flags.DEFINE_integer(
  "profile",
  0,
  "Number of steps to trace with JAX's profiler, after the first 20; the trace"
  " is in the folder `profile` of the run directory.",
  lower_bound=0,
)


def main() -> int | None:
  """Trains and evaluates."""
  config = _CONFIG.value
  parse(config.to_dict())  # Reports invalid fields before JAX is imported.
  workdir = run_path(_WORKDIR.value or flag.default_workdir())
  initialize.set_up_jax()
  from experiments.training.loop import train_and_evaluate

  complete = train_and_evaluate(config, workdir, profile=_PROFILE.value)
  return None if complete else AGAIN


if __name__ == "__main__":
  cli.run(main, needs_config=True)
