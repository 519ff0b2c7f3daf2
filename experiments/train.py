r"""Trains an experiment and evaluates it.

    python -m experiments.train --config=configs/reverse.py
    python -m experiments.train --config=configs/reverse.py:dot \
        --config.train.steps=500 --workdir=/tmp/dot

Leaves a run directory with the config, metrics, TensorBoard events,
checkpoints, evaluations and pictures. Given again, the same command goes on
where the run stands; SIGTERM or Ctrl-C saves and stops it, with exit code 75.
"""

from pathlib import Path

from absl import flags

from experiments import cli
from experiments.distributed import initialize
from experiments.errors import AGAIN

_CONFIG = cli.define_config()
_WORKDIR = flags.DEFINE_string(
  "workdir",
  None,
  "The run's directory; runs/<config>[-<argument>] by default. A run of the"
  " same config found there is resumed.",
)


def main() -> int | None:
  """Trains and evaluates, as the flags say."""
  config = _CONFIG.value
  workdir = _WORKDIR.value or cli.default_workdir(cli.config_argument())
  initialize.set_up_jax()
  from experiments.training.loop import train_and_evaluate

  complete = train_and_evaluate(config, Path(workdir))
  return None if complete else AGAIN


if __name__ == "__main__":
  cli.run(main, config="config")
